"""Learning curves of two-digit addition from a supervised start: GRPO and PPO, one site and three, sync and async.

for each seed: train a start with supervision (`lab.models.addition_start`)
for each algorithm, place and mode, and each seed: train from it, keep the reward per step
a run has learnt where the mean of its last steps reaches the goal
the curves of an algorithm agree where every other one's mean over seeds stays within one standard deviation of that of
mode sync at one site, as means over the steps

Runs that the result has already are kept where the settings of their algorithm are the same, so that it may be made in
several goes: `--fresh` begins anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from _results import RESULTS, ROOT, write_result

from lab.models import addition_start

GOAL, LAST_STEPS, STEPS, SAMPLES = 0.9, 10, 300, 128
PLACES = ("one site", "three sites")
COUPLED = "async 4, coupled"
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "async 1": {"mode": "async", "max_staleness": 1},
    "async 4": {"mode": "async", "max_staleness": 4},
    COUPLED: {"mode": "async", "max_staleness": 4, "objective": "coupled"},
}
_SHARED = {"minibatches": 2, "learning_rate_warmup": 20, "learning_rate_decay": "cosine"}
_GAE = {"discount": 1.0, "trace": 0.95}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "samples_per_prompt": 4, "learning_rate": 2.5e-4, **_SHARED},
    "ppo": {"kind": "ppo", "samples_per_prompt": 1, "learning_rate": 2e-4, **_GAE, **_SHARED},
}
CRITIC = {"start": "actor", "learning_rate": 1e-3, "learning_rate_warmup": 10, "warmup_steps": 5}

Run = dict[str, Any]


def settings(algorithm: str) -> dict[str, Any]:
    """Return of what a kept run of an algorithm must be."""
    return {
        "steps": STEPS,
        "samples": SAMPLES,
        "start": [addition_start.RIGHT_STEPS, addition_start.MIXED_STEPS, addition_start.WRONG],
        "algorithm": ALGORITHMS[algorithm],
        **({"critic": CRITIC} if algorithm == "ppo" else {}),
    }


def experiment(algorithm: str, place: str, mode: str, seed: int, start: Path, work: Path) -> dict[str, Any]:
    """Return the experiment of a run."""
    (work / "one.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "one",
                "engines": ["megatron", "vllm"],
                "nodes": [{"name": "one-0", "gpu": "cpu", "gpus": 4, "nic_gbps": 10, "host_memory_gb": 8}],
            }
        )
    )
    three = {
        "sites": [str(ROOT / f"topology/sites/{site}.yaml") for site in ("alpha", "beta", "gamma")],
        "links": str(ROOT / "topology/quickstart-links.yaml"),
    }
    return {
        "name": "learn",
        "model": {"architecture": str(start), "weights": str(start), "dtype": "fp32"},
        "algorithm": {**ALGORITHMS[algorithm], **MODES[mode]},
        **({"critic": CRITIC} if algorithm == "ppo" else {}),
        "reward": {"kind": "rule"},
        "data": {"kind": "arithmetic", "seed": seed},
        "batch": {
            "samples": SAMPLES,
            "prompt_tokens": addition_start.PROMPT_TOKENS,
            "response_tokens": addition_start.RESPONSE_TOKENS,
        },
        "steps": STEPS,
        "seed": seed,
        "topology": three if place == "three sites" else {"sites": [str(work / "one.yaml")]},
        "planner": {"solver": "sha-ea", "objective": "throughput", "budget_seconds": 5, "seed": 0},
        "launch": {"executor": "local", "walltime": "01:00:00", "gang_timeout": "00:05:00"},
    }


def run(algorithm: str, place: str, mode: str, seed: int, start: Path) -> Run:
    """Run one training and return its curve."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "config.yaml").write_text(
            yaml.safe_dump(experiment(algorithm, place, mode, seed, start, work), sort_keys=False)
        )
        environment = {**os.environ, "HETRL_RUNS": str(work / "runs")}
        command = [sys.executable, "-m", "launch.cli", "submit", str(work / "config.yaml"), "--yes"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        (directory,) = (work / "runs").iterdir()
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        **{"algorithm": algorithm, "place": place, "mode": mode, "seed": seed},
        "rewards": [row["reward"] for row in rows],
        "largest_staleness": max(row["staleness"] for row in rows),
        "seconds": sum(row["seconds"]["iteration"] for row in rows),
    }


def last(found: Run) -> float:
    """Return the mean reward of the last steps of a run."""
    return statistics.fmean(found["rewards"][-LAST_STEPS:])


def distance(ours: Sequence[Run], others: Sequence[Run]) -> float:
    """Return how far two sets of curves are apart, in standard deviations over seeds.

    Both are means over the steps: at a single one, few seeds may happen to have the same reward.
    """
    apart, deviations = [], []
    for step in zip(*(one["rewards"] for one in (*ours, *others)), strict=True):
        values = step[: len(ours)], step[len(ours) :]
        apart.append(abs(statistics.fmean(values[0]) - statistics.fmean(values[1])))
        deviations.append(max(statistics.stdev(part) for part in values))
    return statistics.fmean(apart) / statistics.fmean(deviations)


def settings_of_runs() -> list[tuple[str, str, str]]:
    """Return algorithm, place and mode of the runs of each seed; objective coupled is for GRPO."""
    every = product(ALGORITHMS, PLACES, MODES)
    return [(algorithm, place, mode) for algorithm, place, mode in every if algorithm == "grpo" or mode != COUPLED]


def key(found: Mapping[str, Any]) -> tuple[str, str, str, int]:
    """Return what names a run."""
    return found["algorithm"], found["place"], found["mode"], found["seed"]


def kept() -> list[Run]:
    """Return those runs of the last result whose algorithm has these settings."""
    path = RESULTS / "learn.json"
    result = json.loads(path.read_text()) if path.exists() else {"settings": {}, "runs": []}
    same = {algorithm for algorithm in ALGORITHMS if result["settings"].get(algorithm) == settings(algorithm)}
    return [one for one in result["runs"] if one["algorithm"] in same]


def table_of(runs: Mapping[tuple[str, str, str, int], Run], seeds: Sequence[int]) -> str:
    """Return the part of the page."""
    lines = []
    for algorithm, place, mode in settings_of_runs():
        ours = [runs[algorithm, place, mode, seed] for seed in seeds if (algorithm, place, mode, seed) in runs]
        first = [
            runs[algorithm, PLACES[0], "sync", seed] for seed in seeds if (algorithm, PLACES[0], "sync", seed) in runs
        ]
        if not ours:
            continue
        whole = len(ours) == len(first) == len(seeds) > 1
        lines.append(
            f"| {algorithm} | {place} | {mode} | {statistics.fmean(one['rewards'][0] for one in ours):.2f} "
            f"| {', '.join(f'{last(one):.3f}' for one in ours)} | {max(one['largest_staleness'] for one in ours)} "
            f"| {f'{distance(ours, first):.2f}' if whole else '–'} |"
        )
    wanted = len(settings_of_runs()) * len(seeds)
    so_far = f"{len(runs)} of {wanted} runs so far. " if len(runs) < wanted else ""
    return "\n".join(
        [
            f"{so_far}Two-digit addition by tiny-qwen3 from a supervised start, {STEPS} steps of {SAMPLES} samples, "
            f"{len(seeds)} seeds; last: mean reward of {LAST_STEPS} steps, of each seed (goal {GOAL}); apart: from the "
            "same algorithm in mode sync at one site, in standard deviations over seeds (goal 1). The number of a "
            "mode is `max_staleness`; coupled: `algorithm.objective`, which else is decoupled.",
            "",
            "| algorithm | place | mode | first | last | largest staleness | apart |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *lines,
        ]
    )


def main() -> None:
    """Run what is missing, write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fresh", action="store_true", help="run all, whatever the result has")
    arguments = parser.parse_args()
    runs = {} if arguments.fresh else {key(one): one for one in kept()}
    with tempfile.TemporaryDirectory() as work:
        starts = {seed: Path(work) / f"start-{seed}" for seed in arguments.seeds}
        for seed, (algorithm, place, mode) in product(arguments.seeds, settings_of_runs()):
            if (algorithm, place, mode, seed) in runs:
                continue
            if not starts[seed].exists():
                print(f"start {seed}: {addition_start.write(starts[seed], seed):.2f} right", flush=True)
            found = runs[algorithm, place, mode, seed] = run(algorithm, place, mode, seed, starts[seed])
            print(algorithm, place, mode, seed, f"{last(found):.3f} in {found['seconds']:.0f} s", flush=True)
            write(runs, arguments.seeds)
    write(runs, arguments.seeds)
    print(table_of(runs, arguments.seeds))


def write(runs: Mapping[tuple[str, str, str, int], Run], seeds: Sequence[int]) -> None:
    """Write the result, also one to which no run was added."""
    of_algorithms = {algorithm: settings(algorithm) for algorithm in ALGORITHMS}
    result = {"seeds": seeds, "goal": GOAL, "settings": of_algorithms, "runs": [*runs.values()]}
    write_result("learn", result, table_of(runs, seeds))


if __name__ == "__main__":
    main()
