"""What a plan is chosen for, and the bounds that it must keep (`planner.objective`).

    throughput        the least seconds of an iteration
    cost              the least price of an iteration, with a bound on its seconds;
                      or, with a budget per hour instead, the least seconds of an iteration
    time-to-result    the least seconds until the last step is done: the latest start of a used site, as its file
                      estimates it, and all steps; within the walltime and the GPU-hours that there are

Price is that of all devices that the jobs hold (`hetrl.cost.charges`); where no GPU has one, a GPU-hour costs 1. The
two directions of `cost` are those of AReaL-Hex (arXiv 2511.00796).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetrl.cost import formulas
from hetrl.cost.charges import held_by_site, price_per_hour
from hetrl.cost.formulas import HOUR
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan

THROUGHPUT, COST, TIME_TO_RESULT = "throughput", "cost", "time-to-result"
KINDS = (THROUGHPUT, COST, TIME_TO_RESULT)


@dataclass(frozen=True)
class Objective:
    """What is asked for: one of `KINDS` and its bounds; infinite: none.

    `max_iteration_seconds` and `budget_per_hour` are for `cost`, the others for `time-to-result`: `steps` of the run,
    `walltime_seconds` of each job, `queue_timeout_seconds` that a site's job waits for the others at most.
    `samples_per_iteration` is given where `max_iteration_seconds` was asked for as samples per second: `bounds` then
    tell it so.
    """

    kind: str = THROUGHPUT
    max_iteration_seconds: float = math.inf
    samples_per_iteration: int | None = None
    budget_per_hour: float = math.inf
    steps: int = 1
    walltime_seconds: float = math.inf
    queue_timeout_seconds: float = math.inf
    budget_gpu_hours: float = math.inf


FASTEST = Objective()


@dataclass(frozen=True)
class Measure:
    """What an objective makes least, for people: one `unit` is `scale` of what `plan_value` returns."""

    name: str
    unit: str = ""
    scale: float = 1.0


SECONDS = Measure("iteration", "s")


@dataclass(frozen=True)
class Bound:
    """What a plan has of something that is limited; `key` is where the limit was written, `unit` that of both.

    The limit is the most that a plan may have, or, with `least`, the least that it must have.
    """

    key: str
    unit: str
    found: float
    limit: float
    least: bool = False

    @property
    def excess(self) -> float:
        """Return by what share the plan is beyond the limit, 0 where it keeps it."""
        high, low = (self.limit, self.found) if self.least else (self.found, self.limit)
        return formulas.share_beyond(high, low)

    def spoken(self, found: str) -> str:
        """Return what a plan has of the limit in words, with the number `found` as it is to be shown."""
        return f"{'does' if self.least else 'needs'} {found} {self.unit} of {self.limit:g} ({self.key})"


def rate_per_hour(plan: Plan, topology: Topology) -> float:
    """Return the price of an hour of the plan; without prices, its GPUs."""
    price = price_per_hour(plan, topology)
    return float(sum(held_by_site(plan, topology).values())) if price is None else price


def result_seconds(plan: Plan, topology: Topology, objective: Objective) -> float:
    """Return the time from the submission to the end of the last step."""
    latest = max(topology.site_by_name[site].queue_hours for site in held_by_site(plan, topology))
    return formulas.result_seconds(latest * HOUR, objective.steps, plan.predicted.iteration_seconds)


def bounds(plan: Plan, topology: Topology, objective: Objective) -> tuple[Bound, ...]:
    """Return what a plan, with its prediction, has of all that the objective limits."""
    if objective.kind == COST:
        rate = rate_per_hour(plan, topology)
        return _speed_bound(plan, objective), Bound(
            "planner.budget_per_hour", "per hour", rate, objective.budget_per_hour
        )
    return tuple(_run_bounds(plan, topology, objective)) if objective.kind == TIME_TO_RESULT else ()


def _speed_bound(plan: Plan, objective: Objective) -> Bound:
    """Return the bound on the seconds of an iteration, in the unit in which it was asked for."""
    seconds, limit, samples = (
        plan.predicted.iteration_seconds,
        objective.max_iteration_seconds,
        objective.samples_per_iteration,
    )
    if samples is None:
        return Bound("planner.max_iteration_seconds", "s per iteration", seconds, limit)
    return Bound("planner.min_samples_per_second", "samples/s", samples / seconds, samples / limit, least=True)


def _run_bounds(plan: Plan, topology: Topology, objective: Objective) -> Iterator[Bound]:
    """Yield the bounds of a run: the job of a site waits for the site that starts last, and is billed meanwhile."""
    held = held_by_site(plan, topology)
    end = result_seconds(plan, topology, objective)
    starts = {site: topology.site_by_name[site].queue_hours * HOUR for site in held}
    waits = max(starts.values()) - min(starts.values())
    yield Bound("launch.queue_timeout", "s", waits, objective.queue_timeout_seconds)
    yield Bound("launch.walltime", "s", end - min(starts.values()), objective.walltime_seconds)
    hours = {site: formulas.gpu_hours(held[site], starts[site], end) for site in held}
    yield Bound("planner.budget_gpu_hours", "GPU-hours", sum(hours.values()), objective.budget_gpu_hours)
    for site in held:
        limit = topology.site_by_name[site].budget_gpu_hours
        if limit is not None:
            yield Bound(f"{site}: budget_gpu_hours", "GPU-hours", hours[site], limit)


def measure_of(objective: Objective) -> Measure:
    """Return what the objective makes least."""
    if objective.kind == TIME_TO_RESULT:
        return Measure("until the result", "h", HOUR)
    if objective.kind == COST and math.isinf(objective.budget_per_hour):
        return Measure("price of an iteration")
    return SECONDS


def plan_value(plan: Plan, topology: Topology, objective: Objective) -> float:
    """Return what is to be least, for a plan with its prediction; infinite where it breaks a bound."""
    seconds = plan.predicted.iteration_seconds
    if any(bound.excess > 0 for bound in bounds(plan, topology, objective)):
        return math.inf
    if objective.kind == TIME_TO_RESULT:
        return result_seconds(plan, topology, objective)
    if objective.kind == COST and math.isinf(objective.budget_per_hour):
        return formulas.price_value(rate_per_hour(plan, topology), seconds)
    return seconds
