"""Random legal plans over a small machine, each run for two steps and held against the plan on one device.

for each of some seeds, in sync and async mode: draw a plan, run it, compare its rewards, losses and gradients
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from _results import write_result

from lab.planned.runs import PlannedRuns, make_weights, summary

PLANS = 60


def row_of(runs: PlannedRuns, mode: str, seed: int) -> dict[str, Any]:
    """Run a plan; return what came of it."""
    plan = runs.random_plan(seed)
    row: dict[str, Any] = {"mode": mode, "seed": seed, "plan": summary(plan), "sites": len(plan.site_order)}
    try:
        ran = runs.run(plan)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return {**row, "outcome": f"failed: {str(error.stderr)[-500:]}"}
    outcome = runs.disagreement(ran) or ("agrees" if runs.compared(ran) else "finished")
    rewards = [one["reward"] for one in ran.rows]
    return {**row, "outcome": outcome, "rewards": rewards, "seconds": ran.seconds}


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=PLANS, help="half of them sync, half async")
    plans = parser.parse_args().plans
    rows = []
    with tempfile.TemporaryDirectory() as work:
        weights = make_weights(Path(work) / "weights")
        runs = {mode: PlannedRuns(Path(work) / mode, mode, weights) for mode in ("sync", "async")}
        for seed in range(plans):
            mode = ("sync", "async")[seed % 2]
            rows.append(row_of(runs[mode], mode, seed))
            print(rows[-1], flush=True)
    agree = sum(row["outcome"] == "agrees" for row in rows)
    finished = sum(row["outcome"] in ("agrees", "finished") for row in rows)
    shapes = ["generation", "reference", "training"]
    names = ["actor_generation", "reference_inference", "actor_training"]
    table = "\n".join(
        [
            f"{plans} random plans of GRPO with a reference model over six devices at three sites, two steps each: "
            f"{finished} finish. {agree} give what the plan on one device gives: the rewards, in sync mode losses and "
            "gradients up to 1e-4, too; in async mode the mean reward where all samples are of one version, else there "
            "is nothing to compare (finished). By task: the group, each replica's tensor x pipeline parallelism, what "
            "stays on the devices while others have their turn.",
            "",
            f"| mode | seed | sites | {' | '.join(shapes)} | outcome |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(
                f"| {row['mode']} | {row['seed']} | {row['sites']} "
                f"| {' | '.join(', '.join(row['plan'][name]) for name in names)} | {row['outcome']} |"
                for row in rows
            ),
        ]
    )
    write_result("plans", {"agree": agree, "finished": finished, "plans": plans, "runs": rows}, table)
    print(table)


if __name__ == "__main__":
    main()
