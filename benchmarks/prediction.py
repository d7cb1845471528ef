"""Predicted against played against run: plans whose engines are emulated, everything else of the run real.

for each of so many plans (PPO and GRPO, sync and async, one to four sites), random and found by a short search:
    predicted   by the cost model
    played      by the simulator, until it is steady
    run         with emulated engines, rates and lengths within 10 %, at such a speed that an iteration takes nearly a
                minute, of which controller, gateways and this machine take a small part; several runs side by side,
                which mostly wait
beside them what the simulator plays with rates and lengths that are as far off as those of the run, whose mean they
have: the slowest of many replicas and the longest of many responses are what a batch waits for

The result is written after each run: with `--more` those that it has are kept, so that it may be made in several goes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from typing import Any

from _emulated_run import run_emulated, with_experiment
from _random_plans import Case
from _results import RESULTS, write_result
from simulate import RANDOM, SEARCHED, Compared, compare

from hetrl.errors import HetrlError
from hetrl.lengths import empirical
from hetrl.plan.plan import Predicted
from hetrl.simulator import Simulated, simulate
from hetrl.simulator.noise import Noise
from hetrl.workload import ACTOR_GENERATION, INFERENCES, ITERATION, TRAININGS
from launch.rehearsal import compare as compare_rows, settings_of

ITERATION_SECONDS, COUNTED = 50.0, 8  # of this machine's, and how many iterations count
JOBS = 8
NOISE = 0.1
DRAWN = 20_000  # lengths, for their distribution
GOAL_ITERATION, GOAL_TASK = 0.05, 0.10
LIKELY = 2.0  # standard errors: a smaller gap may be nothing but that steps differ
Failed = tuple[str, str]  # which plan did not run, and why
Measured = tuple[float, float, Mapping[str, float], Mapping[str, float]]  # as `measure` returns it
TASKS = (ACTOR_GENERATION, *INFERENCES, *TRAININGS)


@dataclass(frozen=True)
class Threefold:
    """Seconds of an iteration and of each task, in three ways.

    `noisy` is a play whose rates and lengths are as far off as the run's, which had `response_tokens` on average;
    `errors` are the standard errors of the means over the run's steps.
    """

    made: str
    number: int
    shape: str
    speed: float
    response_tokens: float
    predicted: Mapping[str, float]
    played: Mapping[str, float]
    noisy: Mapping[str, float]
    run: Mapping[str, float]
    errors: Mapping[str, float]

    def off(self, name: str = ITERATION) -> float:
        """Return run / predicted - 1."""
        return self.run[name] / self.predicted[name] - 1

    @property
    def is_sync(self) -> bool:
        """Return whether generation waits for the trainer."""
        return " sync," in self.shape

    @property
    def tasks(self) -> list[str]:
        """Return the tasks that all three have seconds of.

        In mode async a run tells of generation when batches came, and not how long replicas worked for each.
        """
        names = TASKS if self.is_sync else (*INFERENCES, *TRAININGS)
        return [name for name in names if self.predicted.get(name) and self.played.get(name) and name in self.run]

    @property
    def why(self) -> str:
        """Return what the run has and the prediction leaves out, where an iteration is outside its goal."""
        predicted, played, noisy, run = (
            each[ITERATION] for each in (self.predicted, self.played, self.noisy, self.run)
        )
        if abs(self.off()) <= GOAL_ITERATION:
            return ""
        found = []
        if abs(run - predicted) < LIKELY * self.errors[ITERATION]:
            found.append(f"steps differ: the mean of these is known to {self.errors[ITERATION]:.1f} s")
        for what, more in (
            ("played", played - predicted),
            ("noise and lengths", noisy - played),
            ("the rest", run - noisy),
        ):
            if abs(more) > GOAL_ITERATION / 5 * predicted:
                found.append(f"{what} {more:+.1f} s")
        if abs(run / noisy - 1) > GOAL_ITERATION:
            name = max(self.tasks, key=lambda task: abs(self.run[task] - self.noisy[task]))
            found.append(f"{name} {self.run[name] - self.noisy[name]:+.1f} s")
        return "; ".join(found)

    @property
    def worst_task(self) -> str:
        """Return the task whose run is farthest from its prediction."""
        return max(self.tasks, key=lambda name: abs(self.off(name)))


def play_off(case: Case, response_tokens: float, seed: int) -> dict[str, float]:
    """Return the seconds of a play with the noise of a run, and with its mean length."""
    workload, noise = case.problem.workload, Noise(NOISE, f"lengths {case.number}")
    drawn = workload.response.draw(DRAWN, random.Random(f"{seed}/{case.number}"))
    factor = response_tokens / statistics.fmean(noise.length(one, workload.response.maximum) for one in drawn)
    lengths = [min(max(round(factor * one), 1), workload.response.maximum) for one in drawn]
    off = replace(workload, response=empirical(lengths, workload.response.maximum))
    return seconds_of(simulate(case.plan, replace(case.problem, workload=off).model, seed, noise=NOISE))


def seconds_of(found: Predicted | Simulated) -> dict[str, float]:
    """Return the seconds of each task and of an iteration."""
    return {**found.tasks, ITERATION: found.iteration_seconds}


def measure(played: Compared) -> Measured:
    """Run a plan; return its speed, its mean response, the means of a step's seconds, and their standard errors."""
    case = played.case
    problem = with_experiment(case.problem, f"prediction-{played.made}-{case.number}")
    speed = float(f"{case.plan.predicted.iteration_seconds / ITERATION_SECONDS:.2g}")
    settings = settings_of(case.plan, problem, speed=speed, noise=NOISE)
    settings = replace(settings, steps=settings.steps - settings.counted + COUNTED, counted=COUNTED)
    rows = run_emulated(problem, case.plan, settings).rows
    means = {one.name: one.rehearsed for one in compare_rows(rows, case.plan, settings)}
    counted = [row["seconds"] for row in rows[-COUNTED:]]
    spread = {name: statistics.stdev(row.get(name, 0.0) for row in counted) for name in means}
    tokens = sum(row["tokens"] for row in rows[-COUNTED:]) / sum(row["samples"] for row in rows[-COUNTED:])
    errors = {name: speed * one / math.sqrt(COUNTED) for name, one in spread.items()}
    return speed, tokens * settings.emulation.tokens_each, means, errors


def threefold(played: Compared, measured: Measured, seed: int) -> Threefold:
    """Return all that is known of a plan that was predicted, played and run."""
    case, (speed, response_tokens, run, errors) = played.case, measured
    return Threefold(
        played.made,
        case.number,
        played.shape,
        speed,
        response_tokens,
        seconds_of(case.plan.predicted),
        seconds_of(played.simulated),
        play_off(case, response_tokens, seed),
        run,
        errors,
    )


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
    noisy = [abs(one.run[ITERATION] / one.noisy[ITERATION] - 1) for one in found]
    near = sum(one <= GOAL_ITERATION for one in noisy)
    lines = [
        f"Iteration seconds of {len(found)} random and searched plans, run with emulated engines (rates and lengths "
        f"within {NOISE:.0%}), against what our model predicts: median difference {statistics.median(gaps):.1%}, worst "
        f"{max(gaps):.1%}, of synchronous plans {max(sync, default=0.0):.1%}; {iterations} of {len(found)} within "
        f"{GOAL_ITERATION:.0%} (goal: all), {tasks} of {of} tasks within {GOAL_TASK:.0%} (goal: all). Against what "
        f"the simulator plays: median {statistics.median(played):.1%}, worst {max(played):.1%}. Against what it "
        f"plays with rates and lengths as far off as the run's, and with its mean length (noisy): median "
        f"{statistics.median(noisy):.1%}, worst {max(noisy):.1%}, {near} within {GOAL_ITERATION:.0%}. Why: what the "
        f"play has that the prediction leaves out, what noise and lengths add, and the rest. Speed: "
        f"seconds of the engines in one of ours, so that an iteration takes some {ITERATION_SECONDS:.0f}, of which "
        f"{COUNTED} count.",
        "",
        "| plan | what | speed | predicted | played | noisy | run | difference | why | the task farthest off |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(found, key=lambda one: -abs(one.off())):
        name = one.worst_task
        seconds = (each[ITERATION] for each in (one.predicted, one.played, one.noisy, one.run))
        lines.append(
            f"| {one.made} {one.number} | {one.shape} | {one.speed:g} "
            f"| {' | '.join(f'{each:.1f} s' for each in seconds)} | {one.off():+.1%} | {one.why} "
            f"| {name}: {one.predicted[name]:.1f}, {one.played[name]:.1f}, {one.run[name]:.1f} s |"
        )
    lines += [f"\nNot run: {name}: {cause}" for name, cause in failed.items()]
    return "\n".join(lines)


def run_all(played: Sequence[Compared], jobs: int, seed: int) -> Iterator[Threefold | Failed]:
    """Run plans; yield what is known of each that ran, or why it did not."""
    with ProcessPoolExecutor(jobs) as runs:
        running = {runs.submit(measure, one): one for one in played}
        for future in as_completed(running):
            one = running[future]
            try:
                yield threefold(one, future.result(), seed)
            except HetrlError as error:
                yield f"{one.made} {one.case.number}", str(error).splitlines()[0]


def run_before(played: Sequence[Compared], seed: int) -> tuple[list[Threefold], dict[str, str]]:
    """Return what is known of the plans whose runs the last result has, and why others did not run."""
    result = json.loads((RESULTS / "prediction.json").read_text())
    kept: dict[tuple[str, int], Measured] = {
        (row["made"], row["number"]): (row["speed"], row["response_tokens"], row["run"], row["errors"])
        for row in result["runs"]
    }
    names = [(one, kept.get((one.made, one.case.number))) for one in played]
    with Pool() as pool:
        return pool.starmap(threefold, [(one, ran, seed) for one, ran in names if ran], 1), result["failed"]


def write(found: Sequence[Threefold], failed: Mapping[str, str], of: int, seed: int) -> str:
    """Write the result of so many plans; return its part of the page."""
    so_far = f"{len(found)} of {of} runs so far. " if len(found) < of else ""
    table = so_far + table_of(found, failed)
    rows: list[dict[str, Any]] = [asdict(one) for one in found]
    write_result("prediction", {"seed": seed, "noise": NOISE, "runs": rows, "failed": failed}, table)
    return table


def main() -> None:
    """Measure all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--searched", type=int, default=20)
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=JOBS, help="runs side by side")
    parser.add_argument("--again", action="store_true", help="predict and play anew, of the last result's runs")
    parser.add_argument("--more", action="store_true", help="the same, and run those that it lacks")
    arguments = parser.parse_args()
    asked = [
        (made, number, arguments.seed)
        for made, plans in ((SEARCHED, arguments.searched), (RANDOM, arguments.random))
        for number in numbers(plans)
    ]
    with Pool() as pool:
        played = pool.starmap(compare, asked, chunksize=1)
    found, failed = run_before(played, arguments.seed) if arguments.again or arguments.more else ([], {})
    known = {(one.made, one.number) for one in found}
    left = [] if arguments.again else [one for one in played if (one.made, one.case.number) not in known]
    for one in left:
        failed.pop(f"{one.made} {one.case.number}", None)
    for ran in run_all(left, arguments.jobs, arguments.seed):
        print(ran, file=sys.stderr, flush=True)
        if isinstance(ran, Threefold):
            found.append(ran)
        else:
            name, cause = ran
            failed[name] = cause
        write(found, failed, len(played), arguments.seed)
    print(write(found, failed, len(played), arguments.seed))


if __name__ == "__main__":
    main()
