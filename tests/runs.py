"""Whole runs for tests: `hetrl submit` in a directory of its own, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs/quickstart.yaml"


@dataclass(frozen=True)
class Finished:
    """What a `hetrl submit` left behind."""

    code: int
    stdout: str
    stderr: str
    directory: Path

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def digests(self) -> list[str]:
        """Return the digest of every weight version, in order."""
        return [row["digest"] for row in self.summary()["weight_versions"]]

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


def submit(config: Path, work: Path, *arguments: str) -> Finished:
    """Run `hetrl submit` in a directory of its own; relative names in the configuration are those of the repository."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "topology").exists() or (work / "topology").symlink_to(ROOT / "topology")
    command = [sys.executable, "-m", "launch.cli", "submit", str(config), *arguments]
    done = subprocess.run(
        command, cwd=work, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL, check=False
    )
    directories = sorted((work / "runs").glob("*")) if (work / "runs").exists() else []
    directory = directories[-1] if directories else work / "no-run"
    assert_nothing_left(directory.name)
    return Finished(done.returncode, done.stdout, done.stderr, directory)


def assert_nothing_left(run: str) -> None:
    """No process of the run lives on."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HETRL_RUN") == run:
                left.append(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    assert left == []


def changed(work: Path, **sections: Any) -> Path:
    """Write the quickstart's configuration with some keys replaced; a section given as a dict is merged."""
    document = yaml.safe_load(QUICKSTART.read_text())
    for key, value in sections.items():
        document[key] = {**document[key], **value} if isinstance(value, dict) and key in document else value
    work.mkdir(parents=True, exist_ok=True)
    path = work / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
