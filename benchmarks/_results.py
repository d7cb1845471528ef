"""What every benchmark shares: where results go, what machine they are from, and the page made of them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
sys.path.insert(0, str(ROOT))  # for the lab, and before this folder, whose launch.py is a bench


def machine() -> dict[str, Any]:
    """Describe this machine without naming it."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), platform.machine()
    )
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def command() -> str:
    """Return the command that runs, from the repository's root."""
    return shlex.join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])


def write_result(name: str, result: Mapping[str, Any], table: str) -> None:
    """Write `results/<name>.json` with command and machine in it, and make docs/benchmarks.md anew.

    `table` is the benchmark's part of the page, in Markdown; it is kept in the result, so that the page can be made
    from the results alone.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    document = {"bench": name, "command": command(), "machine": machine(), **result, "table": table}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    write_page()


def write_page() -> None:
    """Make docs/benchmarks.md from all results."""
    parts = ["# Benchmarks", "", "Made from `benchmarks/results/*.json` by `make bench-<name>`; do not edit.", ""]
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        where = result["machine"]
        parts += [f"## {result['bench']}", "", *_outdated(result), result["table"], ""]
        parts += [f"`{result['command']}` on {where['cores']} cores of {where['cpu']}, Python {where['python']}.", ""]
    PAGE.write_text("\n".join(parts))


def _outdated(result: Mapping[str, Any]) -> list[str]:
    """Say so where a bench that has a file of knobs has others in it than this result was made with."""
    knobs = Path(__file__).parent / f"{result['bench'].removesuffix('-sample')}.yaml"
    if not knobs.exists() or _holds(result["knobs"], yaml.safe_load(knobs.read_text())):
        return []
    return [f"Made with other knobs than `benchmarks/{knobs.name}` has: not to be compared with what it has made.", ""]


def _holds(kept: Any, written: Any) -> bool:
    """Return whether all that is written in a file is in what was kept of it, which may have defaults beside it."""
    if isinstance(written, dict):
        return all(key in kept and _holds(kept[key], value) for key, value in written.items())
    if isinstance(written, list):
        return len(kept) == len(written) and all(map(_holds, kept, written))
    return bool(kept == written)
