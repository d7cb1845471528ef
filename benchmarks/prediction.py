"""Predicted against played against run: plans whose engines are emulated, everything else of the run real.

for each of so many plans (PPO and GRPO, sync and async, one to four sites), random and found by a short search:
    predicted   by the cost model
    played      by the simulator, until it is steady
    run         with emulated engines, rates and lengths within 10 %, at such a speed that it takes 40 s, in mode async
                120 s; and once more with engines that take a thousandth of their time, which is what everything else
                takes: of that, `speed - 1` times too much is in the first run, and is taken off in mode sync (in mode
                async it happens while engines are at work)
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from _emulated_run import run_emulated, with_experiment
from _results import write_result
from simulate import RANDOM, SEARCHED, compare

from hetrl.errors import HetrlError
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.workload import (
    ACTOR_GENERATION,
    INFERENCES,
    ITERATION,
    TRAININGS,
)
from launch.rehearsal import Settings, compare as compare_rows, settings_of

WALL_SECONDS, MOST_SPEED = {"sync": 40.0, "async": 120.0}, 25.0
FAST, FAST_STEPS = 1000.0, 8
NOISE = 0.1
GOAL_ITERATION, GOAL_TASK = 0.05, 0.10
LIKELY = 2.0  # standard errors: a smaller gap may be nothing but that steps differ
LARGE_PART = 0.3  # of a gap: from where on what is not the engines' is named
TASKS = (ACTOR_GENERATION, *INFERENCES, *TRAININGS)


def is_sync(shape: str) -> bool:
    """Return whether a plan of this shape is of mode sync."""
    return " sync," in shape


@dataclass(frozen=True)
class Threefold:
    """Seconds of an iteration and of each task, in three ways.

    `control` is what is not the engines', at speed 1; `errors` are the standard errors of the means over the run's
    steps.
    """

    made: str
    number: int
    shape: str
    speed: float
    predicted: Mapping[str, float]
    played: Mapping[str, float]
    run: Mapping[str, float]
    control: Mapping[str, float]
    errors: Mapping[str, float]

    def off(self, name: str = ITERATION) -> float:
        """Return run / predicted - 1."""
        return self.run[name] / self.predicted[name] - 1

    @property
    def is_sync(self) -> bool:
        """Return whether generation waits for the trainer."""
        return is_sync(self.shape)

    @property
    def tasks(self) -> list[str]:
        """Return the tasks that all three have seconds of.

        In mode async a run tells of generation when batches came, and not how long replicas worked for each.
        """
        names = TASKS if self.is_sync else (*INFERENCES, *TRAININGS)
        return [name for name in names if self.predicted.get(name) and self.played.get(name) and name in self.run]

    @property
    def as_it_ran(self) -> float:
        """Return the seconds of an iteration with all that was too long by the speed."""
        return self.run[ITERATION] + (self.speed - 1) * self.control[ITERATION] * self.is_sync

    @property
    def why(self) -> str:
        """Return what the run has and the prediction leaves out, where an iteration is outside its goal."""
        gap = self.run[ITERATION] - self.predicted[ITERATION]
        if abs(self.off()) <= GOAL_ITERATION:
            return ""
        found = []
        if abs(gap) < LIKELY * self.errors[ITERATION]:
            found.append(f"steps differ: the mean of these is known to {self.errors[ITERATION]:.1f} s")
        if gap < 0 < self.as_it_ran - self.predicted[ITERATION]:
            found.append("what was taken off is too much: this machine was busier in the second run")
        others = self.control[ITERATION] * (1.0 if self.is_sync else self.speed)
        if others > LARGE_PART * gap > 0:
            found.append(f"{'' if self.is_sync else 'up to '}{others:.2f} s are not the engines'")
        name = max(self.tasks, key=lambda task: abs(self.run[task] - self.predicted[task]))
        return "; ".join([*found, f"{name} {self.run[name] - self.predicted[name]:+.1f} s"])

    @property
    def worst_task(self) -> str:
        """Return the task whose run is farthest from its prediction."""
        return max(self.tasks, key=lambda name: abs(self.off(name)))


def measure(made: str, number: int, seed: int) -> Threefold:
    """Return a plan's seconds in three ways."""
    played = compare(made, number, seed)
    case = played.case
    problem = with_experiment(case.problem, f"prediction-{made}-{number}")
    settings = paced(settings_of(case.plan, problem, noise=NOISE), case.plan)
    slow, errors = seconds_of(problem, case.plan, settings)
    steps = settings.steps - settings.counted
    fast = Settings(steps + FAST_STEPS, FAST_STEPS, settings.emulation.model_copy(update={"speed": FAST}))
    control = {name: seconds / FAST for name, seconds in seconds_of(problem, case.plan, fast)[0].items()}
    speed = settings.emulation.speed
    off = (speed - 1) * is_sync(played.shape)
    run = {name: seconds - off * control[name] for name, seconds in slow.items()}
    predicted = {**case.plan.predicted.tasks, ITERATION: case.plan.predicted.iteration_seconds}
    simulated = {**played.simulated.tasks, ITERATION: played.simulated.iteration_seconds}
    return Threefold(made, number, played.shape, speed, predicted, simulated, run, control, errors)


def paced(settings: Settings, plan: Plan) -> Settings:
    """Return the settings with a speed at which all steps take `WALL_SECONDS`, or the most there may be."""
    wall_seconds = WALL_SECONDS[plan.algorithm.mode]
    wanted = float(f"{plan.predicted.iteration_seconds * settings.steps / wall_seconds:.2g}")
    speed = min(max(wanted, 1.0), MOST_SPEED)
    return replace(settings, emulation=settings.emulation.model_copy(update={"speed": speed}))


def seconds_of(problem: Problem, plan: Plan, settings: Settings) -> tuple[dict[str, float], dict[str, float]]:
    """Run a plan; return the seconds of its tasks and of an iteration, in those of the engines, and their errors."""
    rows, speed = run_emulated(problem, plan, settings).rows, settings.emulation.speed
    means = {one.name: one.rehearsed for one in compare_rows(rows, plan, settings)}
    counted = [row["seconds"] for row in rows[-settings.counted :]]
    spread = {name: statistics.stdev(row.get(name, 0.0) for row in counted) for name in means}
    return means, {name: speed * one / math.sqrt(len(counted)) for name, one in spread.items()}


def numbers(plans: int) -> list[int]:
    """Return which plans of the series are taken: few of them have every algorithm, mode and number of sites."""
    return [index * 5 % 16 if index < 16 else index for index in range(plans)]


def within(found: Sequence[Threefold]) -> tuple[int, int, int]:
    """Return how many iterations are within their goal, how many tasks are, of how many."""
    iterations = sum(abs(one.off()) <= GOAL_ITERATION for one in found)
    tasks = [abs(one.off(name)) <= GOAL_TASK for one in found for name in one.tasks]
    return iterations, sum(tasks), len(tasks)


def table_of(found: Sequence[Threefold], failed: Mapping[str, str]) -> str:
    """Return the part of the page."""
    gaps, sync = [abs(one.off()) for one in found], [abs(one.off()) for one in found if one.is_sync]
    iterations, tasks, of = within(found)
    played = [abs(one.run[ITERATION] / one.played[ITERATION] - 1) for one in found]
    lines = [
        f"Iteration seconds of {len(found)} random and searched plans, run with emulated engines (rates and lengths "
        f"within {NOISE:.0%}), against what our model predicts: median difference {statistics.median(gaps):.1%}, worst "
        f"{max(gaps):.1%}, of synchronous plans {max(sync, default=0.0):.1%}; {iterations} of {len(found)} within "
        f"{GOAL_ITERATION:.0%} (goal: all), {tasks} of {of} tasks "
        f"within {GOAL_TASK:.0%} (goal: all). Against what the simulator plays: median "
        f"{statistics.median(played):.1%}, worst {max(played):.1%}. What controller, gateways and this machine take "
        f"for an iteration is {statistics.median(one.control[ITERATION] for one in found):.2f} s in the median; the "
        "runs go faster than real ones would, and what that part is too long by is taken off of synchronous ones, as "
        "far as a second run tells it; in asynchronous ones most of it happens while engines are at work.",
        "",
        "| plan | what | speed | predicted | played | run (as it ran) | difference | why | the task farthest off |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(found, key=lambda one: -abs(one.off())):
        name = one.worst_task
        lines.append(
            f"| {one.made} {one.number} | {one.shape} | {one.speed:g} | {one.predicted[ITERATION]:.1f} s "
            f"| {one.played[ITERATION]:.1f} s | {one.run[ITERATION]:.1f} s ({one.as_it_ran:.1f}) "
            f"| {one.off():+.1%} | {one.why} "
            f"| {name}: {one.predicted[name]:.1f}, {one.played[name]:.1f}, {one.run[name]:.1f} s |"
        )
    lines += [f"\nNot run: {name}: {cause}" for name, cause in failed.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--searched", type=int, default=20)
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found: list[Threefold] = []
    failed: dict[str, str] = {}
    for made, plans in ((SEARCHED, arguments.searched), (RANDOM, arguments.random)):
        for number in numbers(plans):
            try:
                found.append(measure(made, number, arguments.seed))
            except HetrlError as error:
                failed[f"{made} {number}"] = str(error).splitlines()[0]
            print(found[-1] if found else failed, failed, file=sys.stderr, flush=True)
    table = table_of(found, failed)
    rows: list[dict[str, Any]] = [asdict(one) for one in found]
    write_result("prediction", {"seed": arguments.seed, "noise": NOISE, "runs": rows, "failed": failed}, table)
    print(table)


if __name__ == "__main__":
    main()
