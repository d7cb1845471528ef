"""Learning curves of the quickstart, synchronous and asynchronous, over several seeds.

for each mode and seed: run the quickstart with this seed everywhere, keep its reward per step
the curves agree where the means over seeds of the last steps differ by at most one standard deviation
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from _results import ROOT, write_result

CONFIGS = {"sync": "configs/quickstart.yaml", "async": "configs/quickstart-async.yaml"}
LAST_STEPS = 10


def run(config: str, seed: int) -> dict[str, Any]:
    """Run one training and return its curve and summary."""
    document = yaml.safe_load((ROOT / config).read_text())
    document["seed"] = document["model"]["seed"] = document["data"]["seed"] = seed
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "config.yaml"
        path.write_text(yaml.safe_dump(document))
        environment = {**os.environ, "HETRL_RUNS": f"{work}/runs"}
        command = [sys.executable, "-m", "launch.cli", "submit", str(path), "--yes"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        (directory,) = Path(work, "runs").iterdir()
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((directory / "summary.json").read_text())
    return {
        "seed": seed,
        "rewards": [row["reward"] for row in rows],
        "dropped_groups": sum(row["dropped_groups"] for row in rows),
        "largest_staleness": max(row["weight_version"] - min(map(int, row["versions"])) for row in rows),
        "warm_start": summary["warm_start"],
        "seconds": sum(row["seconds"]["iteration"] for row in rows),
    }


def last(run: dict[str, Any]) -> float:
    """Return the mean reward of the last steps of a run."""
    return statistics.fmean(run["rewards"][-LAST_STEPS:])


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    runs = {mode: [run(config, seed) for seed in seeds] for mode, config in CONFIGS.items()}
    means = {mode: statistics.fmean(map(last, found)) for mode, found in runs.items()}
    deviation = statistics.stdev([last(found) for mode in runs for found in runs[mode]]) if len(seeds) > 1 else 0.0
    rows = [
        f"| {mode} | {found['seed']} | {found['rewards'][0]:.2f} | {last(found):.3f} | {max(found['rewards']):.2f} "
        f"| {found['largest_staleness']} | {found['seconds']:.0f} |"
        for mode in runs
        for found in runs[mode]
    ]
    table = "\n".join(
        [
            f"Reward of the quickstart (last: mean of {LAST_STEPS} steps), {len(seeds)} seeds per mode. Means "
            f"{means['sync']:.3f} (sync) and {means['async']:.3f} (async); standard deviation over all runs "
            f"{deviation:.3f}.",
            "",
            "| mode | seed | first | last | best | largest staleness | seconds |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    )
    write_result("learn", {"seeds": seeds, "means": means, "deviation": deviation, "runs": runs}, table)
    print(table)


if __name__ == "__main__":
    main()
