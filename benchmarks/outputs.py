"""What the planner says and the launcher renders for every file in `configs/`, as files of a directory.

Two states of the program say the same where the directories that each wrote are equal:

    python benchmarks/outputs.py /tmp/before     # in a checkout of the one
    python benchmarks/outputs.py /tmp/after      # in a checkout of the other
    diff -r /tmp/before /tmp/after

The search ends after a fixed number of evaluations. Left out is what differs from one call to the next: the seconds
that planning took, times and process ids, free ports, keys, the checkout's path. Of the modules that scripts start, the
name counts, not the package that it lies in. Another state than this file's is asked from its checkout:
`PYTHONPATH=. python PATH/benchmarks/outputs.py DIR`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))  # the checkout that is asked, wherever this file lies

from hetrl import search
from launch import cli

EVALUATIONS, SEED = 20_000, 0
BASELINES = ("verl", "streamrl")
BASELINE_BUDGET_SECONDS = 3600  # they have tried all they know long before
BASELINE_CONFIGS = ("gsm8k-llama-3.1-8b-ppo", "paper-multi-country")
VARYING = ("keys.json", "events.jsonl", "state.json")
QUESTIONS = """
generation --architecture qwen2.5-7b --gpu a100-80gb --tp 1 --batch 1 --prompt 1 --response 2048
generation --architecture qwen3-14b --gpu l40s --tp 4 --pp 2 --batch 64 --prompt 1024 --response 1024
decode-layer --architecture llama-1-13b --gpu l4 --tp 2 --batch 64
prefill-layer --architecture qwen3-8b --gpu h100 --tokens 4096
training --architecture llama-3.1-8b --gpu a100-80gb --gpus 16 --sequence 4096
training --architecture qwen3-4b --gpu l40s --gpus 8 --sequence 2048 --samples 64 --recompute full
inference --architecture qwen3-8b --gpu a100-80gb --samples 256 --sequence 2048
weight-sync --architecture qwen3-8b --topology topology/scenarios/multi-country.yaml --from r0 --to r1 r2
"""


def main(out: Path) -> None:
    """Write every output below `out`, which must not exist."""
    out.mkdir(parents=True)
    search.solve = _with_evaluations(search.solve)
    configs = sorted(Path("configs").glob("*.yaml"))
    for config in configs:
        name = config.stem
        plan = out / f"{name}.plan.json"
        plan.write_text(said(["plan", str(config), "--json", "--seed", str(SEED), "--budget", "3600"]))
        tell(out / f"{name}.plan.txt", ["plan", str(config), "--seed", str(SEED), "--budget", "3600"])
        asked = [str(plan), "--config", str(config)]
        tell(out / f"{name}.explain.json", ["explain", *asked, "--json", "--html", str(out / f"{name}.html")])
        tell(out / f"{name}.explain.txt", ["explain", *asked])
        tell(out / f"{name}.simulate.json", ["simulate", *asked, "--json"])
        render(config, out / f"{name}.run")
    for name in BASELINE_CONFIGS:
        for solver in BASELINES:
            options = ["--json", "--solver", solver, "--budget", str(BASELINE_BUDGET_SECONDS)]
            tell(out / f"{name}.{solver}.json", ["plan", f"configs/{name}.yaml", *options])
    for number, question in enumerate(QUESTIONS.strip().splitlines()):
        for form in ("", "--json"):
            tell(out / f"predict-{number}{form}.txt", ["predict", "--task", *shlex.split(question), *form.split()])


def _with_evaluations(solve: Any) -> Any:
    """Return `solve`, ended by evaluations instead of the clock."""

    def bounded(problem: Any, solver: str, *arguments: Any, **options: Any) -> Any:
        if solver == "sha-ea":
            options["evaluations"] = EVALUATIONS
        plan = solve(problem, solver, *arguments, **options)
        return replace(plan, solver=replace(plan.solver, seconds=0.0))

    return bounded


def said(arguments: Iterable[str]) -> str:
    """Return what a verb prints on stdout, and its exit code where it is not 0."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = cli.main([*arguments])
    return text.getvalue() + (f"exit code {code}\n" if code else "")


def tell(path: Path, arguments: Iterable[str]) -> None:
    """Write what a verb prints to a file."""
    path.write_text(settled(said(arguments)))


def settled(text: str) -> str:
    """Return a text without what differs from one call, or one checkout, to the next."""
    text = text.replace(str(Path.cwd()), "CHECKOUT")
    text = re.sub(r"\d{8}-\d{6}", "STAMP", text)
    text = re.sub(r'(127\.0\.0\.1:|_PORT": ")\d+', r"\1PORT", text)
    return re.sub(r"hetrl\.runtime\.(?:\w+\.)*(\w+)", r"hetrl.runtime.\1", text)


def render(config: Path, out: Path) -> None:
    """Write the scripts of a run, and what its sites are sent but for the keys."""
    tell(out.with_suffix(".submit.txt"), ["submit", str(config), "--dry-run"])
    for run in Path("runs").glob("*"):
        for path in sorted(run.rglob("*")):
            if path.is_file() and "code" not in path.parts and not path.name.endswith(VARYING):
                copy = out / path.relative_to(run)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(settled(path.read_text()))
        shutil.rmtree(run)


if __name__ == "__main__":
    if Path("runs").exists():
        sys.exit("runs/ holds runs; ask a checkout without any")
    os.environ["COLUMNS"] = "80"
    main(Path(sys.argv[1]))
