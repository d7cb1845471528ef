"""Compare the simulator with the cost model on random and on searched plans: two ways to the seconds of an iteration.

for each of so many plans (PPO and GRPO, sync and async, one to four sites), drawn at random or found by a short search:
    play it until it is steady; relative difference = predicted / simulated - 1
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass, replace
from multiprocessing import Pool

from _random_plans import Case, random_case, searched_case
from _results import write_result

from hetrl.cost.iteration import switch_seconds
from hetrl.plan.plan import Plan
from hetrl.simulator import Simulated, simulate
from hetrl.workload import ACTOR_GENERATION, TASKS

LISTED = 10
RANDOM, SEARCHED = "random", "searched"
BUSY_LINK, LARGE_SHARE = 0.5, 0.05  # from where on a cause is named
GOAL_MEDIAN, GOAL_P95, GOAL_WORST = 0.02, 0.08, 0.15


@dataclass(frozen=True)
class Compared:
    """One plan, random or searched, predicted and played; `reason` is its `why`, which needs the play's spans."""

    made: str
    case: Case
    simulated: Simulated
    reason: str = ""

    @property
    def difference(self) -> float:
        """Return predicted / simulated - 1."""
        return self.case.plan.predicted.iteration_seconds / self.simulated.iteration_seconds - 1

    @property
    def why(self) -> str:
        """Return why the two may differ in this direction: what the prediction leaves out or counts in full."""
        short = [*self._busy_links(), *self._dropped(), *self._uneven_minibatches()]
        long = [*self._switches(), *self._refills()]
        predicted = self.case.plan.predicted.tasks
        gaps = {name: predicted[name] - simulated for name, simulated in self.simulated.tasks.items()}
        name = max(gaps, key=lambda key: abs(gaps[key]))
        return "; ".join([*(short if self.difference < 0 else long), f"{name} {gaps[name]:+.1f} s"])

    def _busy_links(self) -> list[str]:
        """Name the links on which weights and trainings slow each other down before they are full."""
        topology, seconds = self.case.problem.topology, self.simulated.iteration_seconds
        found = []
        for ends, size_gb in self.simulated.wan_gb.items():
            link = topology.link(*ends.split("-"))
            if link and size_gb * 8 / link.gbps > BUSY_LINK * seconds:
                found.append(f"weights and trainings share link {ends}, busy {size_gb * 8 / link.gbps / seconds:.0%}")
        return found

    def _dropped(self) -> list[str]:
        workload = self.case.problem.workload
        trained = self.simulated.iterations * workload.samples / workload.samples_per_prompt
        share = self.simulated.dropped / (trained + self.simulated.dropped)
        return [f"{share:.0%} of the prompts are too old and drawn again"] if share > LARGE_SHARE else []

    def _uneven_minibatches(self) -> list[str]:
        workload = self.case.problem.workload
        samples = workload.samples / workload.optimizer_steps_per_iteration
        deviation = workload.response.deviation / (workload.sequence_tokens * math.sqrt(samples))
        return [f"the tokens of a minibatch vary by {deviation:.0%}"] if deviation > LARGE_SHARE else []

    def _switches(self) -> list[str]:
        """Say where states move to the host beside other stations, which the prediction adds one after the other."""
        problem, tasks = self.case.problem, self.case.plan.tasks
        seconds = sum(switch_seconds(n, task, problem.model) for n, task in tasks.items())
        large = seconds > LARGE_SHARE * self.simulated.iteration_seconds
        return [f"{seconds:.1f} s of switches run beside other stations"] if large else []

    def _refills(self) -> list[str]:
        """Say where generation is stopped while few sequences run; the prediction fills the cache of all again."""
        name = ACTOR_GENERATION
        shares = any(name in group.tasks and len(group.tasks) > 1 for group in self.case.plan.groups)
        empties = self.case.problem.workload.staleness > 0 and self.case.plan.tasks[name].idle_state != "resident"
        return ["stops find less than a full cache"] if shares and empties else []

    @property
    def shape(self) -> str:
        """Return algorithm, mode, sites and groups in a few words."""
        plan, workload = self.case.plan, self.case.problem.workload
        mode = f"async {workload.max_staleness}" if workload.mode == "async" else "sync"
        groups = " / ".join("+".join(short_name(name) for name in group.tasks) for group in plan.groups)
        return f"{workload.algorithm} {mode}, {len(_sites(plan))} sites, {workload.response.kind}: {groups}"


def short_name(task: str) -> str:
    """Return what a task is called in the shape of a plan."""
    return "gen" if task == ACTOR_GENERATION else task.replace("_inference", " inf").replace("_training", " train")


def _sites(plan: Plan) -> set[str]:
    return {device.split("/")[0] for task in plan.tasks.values() for device in task.devices}


def compare(made: str, number: int, seed: int) -> Compared:
    """Make, predict and play plan `number`: a random one, or a searched one."""
    case = (searched_case if made == SEARCHED else random_case)(number, seed)
    found = Compared(made, case, simulate(case.plan, case.problem.model, seed))
    return replace(found, reason=found.why, simulated=replace(found.simulated, spans=()))


def percentile(values: list[float], share: float) -> float:
    """Return the value that this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def page(found: list[Compared]) -> str:
    """Return the benchmark's part of the page."""
    gaps = [abs(one.difference) for one in found]
    lines = [
        f"Iteration seconds of {len(found)} random and searched plans, predicted by our model against our simulator: "
        f"median difference {statistics.median(gaps):.1%} (goal {GOAL_MEDIAN:.0%}), 95th percentile "
        f"{percentile(gaps, 0.95):.1%} (goal {GOAL_P95:.0%}), worst {max(gaps):.1%} (goal {GOAL_WORST:.0%}).",
        "",
        "| plans | count | median | 95th percentile | worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for label, chosen in _parts(found):
        own = [abs(one.difference) for one in chosen]
        row = f"| {label} | {len(own)} | {statistics.median(own):.1%} | {percentile(own, 0.95):.1%} | {max(own):.1%} |"
        lines.append(row)
    lines += [
        "",
        "The worst. Why: what the simulator plays and the prediction leaves out or counts in full, and the task that "
        "differs most:",
        "",
    ]
    lines += ["| plan | what | predicted | simulated | difference | why |", "| --- | --- | --- | --- | --- | --- |"]
    for one in sorted(found, key=lambda one: -abs(one.difference))[:LISTED]:
        lines.append(
            f"| {one.made} {one.case.number} | {one.shape} | {one.case.plan.predicted.iteration_seconds:.1f} s "
            f"| {one.simulated.iteration_seconds:.1f} s | {one.difference:+.1%} | {one.reason} |"
        )
    return "\n".join(lines)


def _parts(found: list[Compared]) -> list[tuple[str, list[Compared]]]:
    parts: dict[str, list[Compared]] = {}
    for one in found:
        workload = one.case.problem.workload
        for label in (
            one.made,
            workload.algorithm,
            workload.mode,
            workload.response.kind,
            f"{len(_sites(one.case.plan))} sites",
        ):
            parts.setdefault(label, []).append(one)
    return sorted(parts.items())


def record(one: Compared) -> dict[str, object]:
    """Return what the result keeps of a plan."""
    tasks = {t: [one.case.plan.predicted.tasks.get(t), one.simulated.tasks.get(t)] for t in (*TASKS, "weight_sync")}
    return {
        "made": one.made,
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
    parser.add_argument("--plans", type=int, default=500, help="random ones")
    parser.add_argument("--searched", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    asked = [(RANDOM, number, arguments.seed) for number in range(arguments.plans)]
    asked += [(SEARCHED, number, arguments.seed) for number in range(arguments.searched)]
    with Pool() as pool:
        found = pool.starmap(compare, asked, chunksize=4)
    gaps = [abs(one.difference) for one in found]
    summary = {"median": statistics.median(gaps), "percentile_95": percentile(gaps, 0.95), "worst": max(gaps)}
    table = page(found)
    write_result("simulate", {"seed": arguments.seed, **summary, "plans": [record(one) for one in found]}, table)
    print(table)


if __name__ == "__main__":
    main()
