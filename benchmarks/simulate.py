"""Compare the simulator with the cost model on random feasible plans: two ways to the seconds of an iteration.

for each of so many plans (PPO and GRPO, sync and async, one to four sites):
    play it until it is steady; relative difference = predicted / simulated - 1
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

from _random_plans import Case, random_case
from _results import write_result

from hetrl.plan import Plan
from hetrl.simulate import Simulated, simulate
from hetrl.workload import ACTOR_GENERATION, TASKS

LISTED = 10
GOAL_MEDIAN, GOAL_P95 = 0.05, 0.15


@dataclass(frozen=True)
class Compared:
    """One plan, predicted and played."""

    case: Case
    simulated: Simulated

    @property
    def difference(self) -> float:
        """Return predicted / simulated - 1."""
        return self.case.plan.predicted.iteration_seconds / self.simulated.iteration_seconds - 1

    @property
    def reason(self) -> str:
        """Return what binds or differs: a link that is busy all the time, else the task that is furthest off."""
        topology, seconds = self.case.problem.topology, self.simulated.iteration_seconds
        for ends, size_gb in self.simulated.wan_gb.items():
            link = topology.link(*ends.split("-"))
            if link and size_gb * 8 / link.gbps > 0.93 * seconds:
                return f"link {ends} never rests"
        predicted = self.case.plan.predicted.tasks
        gaps = {name: predicted[name] - simulated for name, simulated in self.simulated.tasks.items()}
        name = max(gaps, key=lambda key: abs(gaps[key]))
        return f"{name} {gaps[name]:+.1f} s"

    @property
    def shape(self) -> str:
        """Return algorithm, mode, sites and groups in a few words."""
        plan, workload = self.case.plan, self.case.problem.workload
        mode = f"async {workload.max_staleness}" if workload.mode == "async" else "sync"
        groups = " / ".join("+".join(_short(name) for name in group.tasks) for group in plan.groups)
        return f"{workload.algorithm} {mode}, {len(_sites(plan))} sites, {workload.response.kind}: {groups}"


def _short(task: str) -> str:
    return "gen" if task == ACTOR_GENERATION else task.replace("_inference", " inf").replace("_training", " train")


def _sites(plan: Plan) -> set[str]:
    return {device.split("/")[0] for task in plan.tasks.values() for device in task.devices}


def compare(number: int, seed: int) -> Compared:
    """Make, predict and play plan `number`."""
    case = random_case(number, seed)
    return Compared(case, simulate(case.plan, case.problem.topology, case.problem.workload, seed))


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def page(found: list[Compared]) -> str:
    """Return the benchmark's part of the page."""
    gaps = [abs(one.difference) for one in found]
    lines = [
        f"Iteration seconds of {len(found)} random feasible plans, predicted by our model against our simulator: "
        f"median difference {statistics.median(gaps):.1%} (goal {GOAL_MEDIAN:.0%}), 95th percentile "
        f"{percentile(gaps, 0.95):.1%} (goal {GOAL_P95:.0%}), worst {max(gaps):.1%}.",
        "",
        "| plans | count | median | 95th percentile | worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for label, chosen in _parts(found):
        own = [abs(one.difference) for one in chosen]
        row = f"| {label} | {len(own)} | {statistics.median(own):.1%} | {percentile(own, 0.95):.1%} | {max(own):.1%} |"
        lines.append(row)
    lines += ["", "The worst, with the link that binds or the task whose own seconds differ most:", ""]
    lines += ["| plan | what | predicted | simulated | difference | why |", "| --- | --- | --- | --- | --- | --- |"]
    for one in sorted(found, key=lambda one: -abs(one.difference))[:LISTED]:
        lines.append(
            f"| {one.case.number} | {one.shape} | {one.case.plan.predicted.iteration_seconds:.1f} s "
            f"| {one.simulated.iteration_seconds:.1f} s | {one.difference:+.1%} | {one.reason} |"
        )
    return "\n".join(lines)


def _parts(found: list[Compared]) -> list[tuple[str, list[Compared]]]:
    parts: dict[str, list[Compared]] = {}
    for one in found:
        workload = one.case.problem.workload
        for label in (workload.algorithm, workload.mode, workload.response.kind, f"{len(_sites(one.case.plan))} sites"):
            parts.setdefault(label, []).append(one)
    return sorted(parts.items())


def record(one: Compared) -> dict[str, object]:
    """Return what the result keeps of a plan."""
    tasks = {t: [one.case.plan.predicted.tasks.get(t), one.simulated.tasks.get(t)] for t in (*TASKS, "weight_sync")}
    return {
        "plan": one.case.number,
        "shape": one.shape,
        "predicted_seconds": one.case.plan.predicted.iteration_seconds,
        "simulated_seconds": one.simulated.iteration_seconds,
        "reason": one.reason,
        "iterations": one.simulated.iterations,
        "steady": one.simulated.steady,
        "tasks": {name: pair for name, pair in tasks.items() if None not in pair},
    }


def main() -> None:
    """Compare all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = [compare(number, arguments.seed) for number in range(arguments.plans)]
    gaps = [abs(one.difference) for one in found]
    summary = {"median": statistics.median(gaps), "percentile_95": percentile(gaps, 0.95), "worst": max(gaps)}
    table = page(found)
    write_result("simulate", {"seed": arguments.seed, **summary, "plans": [record(one) for one in found]}, table)
    print(table)


if __name__ == "__main__":
    main()
