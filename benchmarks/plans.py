"""Random legal plans over a small machine, each run for two steps and held against the plan on one device.

for each of some seeds, in sync and async mode: draw a plan, run it, compare its rewards, losses, values and gradients
of some plans in sync mode: kill a run after its first step, run it again, compare the digests of all weights

`--kind ppo` has all six tasks; `grpo` has three.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from _results import RESULTS, write_result

from lab.planned.copies import Copies
from lab.planned.runs import PlannedRuns, digests, make_weights, summary

PLANS = 60
AGAIN = 5  # plans whose run is killed and made again
NAMES = {"grpo": "plans", "ppo": "plans-ppo"}  # of the results
JOB = {"grpo": "GRPO with a reference model", "ppo": "PPO with a reference, a reward model and a critic"}


def row_of(runs: PlannedRuns, mode: str, seed: int, again: bool) -> dict[str, Any]:
    """Run a plan; return what came of it, `again` also whether a second run had the same weights."""
    plan = runs.random_plan(seed)
    row: dict[str, Any] = {"mode": mode, "seed": seed, "plan": summary(plan), "sites": len(plan.site_order)}
    try:
        ran = runs.run(plan)
        if again:
            runs.break_off(plan)
            row["same_digests"] = digests(runs.run(plan)) == digests(ran)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return {**row, "outcome": f"failed: {str(error.stderr)[-500:]}"}
    outcome = runs.disagreement(ran) or "agrees"
    rewards = [one["reward"] for one in ran.rows]
    return {**row, "outcome": outcome, "rewards": rewards, "seconds": ran.seconds}


def table_of(kind: str, rows: list[dict[str, Any]]) -> tuple[str, dict[str, int]]:
    """Return the part of the page, and the figures."""
    found = {
        "plans": len(rows),
        "finished": sum(not row["outcome"].startswith("failed") for row in rows),
        "agree": sum(row["outcome"] == "agrees" for row in rows),
        "run_again": sum("same_digests" in row for row in rows),
        "same_digests": sum(row.get("same_digests", False) for row in rows),
    }
    names = [*rows[0]["plan"]]
    head = [
        f"{found['plans']} random plans of {JOB[kind]} over six devices at three sites, two steps each: "
        f"{found['finished']} finish. {found['agree']} give what the plan on one device gives: the rewards by rule, in "
        "sync mode losses, values, rewards by a model and gradients up to 1e-4, too; in async mode of each prompt "
        "whose samples were drawn under the first version alone. Of "
        f"{found['run_again']} that were killed after their first step and run again, {found['same_digests']} had the "
        "same digests of all weights. By task: the group, each replica's tensor x pipeline parallelism, what stays on "
        "the devices while others have their turn.",
        "",
        f"| mode | seed | sites | {' | '.join(name.replace('_', ' ') for name in names)} | outcome |",
        f"| {' | '.join(['---'] * (len(names) + 4))} |",
    ]
    lines = [
        f"| {row['mode']} | {row['seed']} | {row['sites']} "
        f"| {' | '.join(', '.join(row['plan'][name]) for name in names)} | {row['outcome']} |"
        for row in rows
    ]
    return "\n".join([*head, *lines]), found


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=[*NAMES], default="grpo")
    parser.add_argument("--plans", type=int, default=PLANS, help="half of them sync, half async")
    parser.add_argument("--only", type=int, nargs="+", help="run these seeds alone; the others' rows are kept")
    arguments = parser.parse_args()
    modes = ("sync", "async")
    kept = RESULTS / f"{NAMES[arguments.kind]}.json"
    rows = json.loads(kept.read_text())["runs"] if arguments.only else [{} for _ in range(arguments.plans)]
    with tempfile.TemporaryDirectory() as work, Copies() as copies:
        weights = make_weights(copies, Path(work) / "weights")
        sync = PlannedRuns(copies, Path(work) / "sync", "sync", weights, arguments.kind)
        runs = {
            "sync": sync,
            "async": PlannedRuns(copies, Path(work) / "async", "async", weights, arguments.kind, sync.reference),
        }
        for seed in arguments.only or range(arguments.plans):
            mode = modes[seed % 2]
            rows[seed] = row_of(runs[mode], mode, seed, again=mode == "sync" and seed // 2 < AGAIN)
            print(rows[seed], flush=True)
    table, figures = table_of(arguments.kind, rows)
    write_result(NAMES[arguments.kind], {**figures, "runs": rows}, table)
    print(table)


if __name__ == "__main__":
    main()
