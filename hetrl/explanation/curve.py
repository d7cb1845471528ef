"""Throughput over price: the fastest plans for a handful of budgets per hour, each a search of its own.

    least = the cheapest plan per hour that a search finds; most = the price of every GPU
    budgets = `BUDGETS` of them, from the price of `least` to `most`, each so many times the one before
    for each budget: the fastest plan that a search finds within it

Of all plans, the one at hand included, the curve has those that no other one does better than: cheaper and as fast, or
faster and as cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from hetrl.cost.charges import Asked, asked_for, has_prices
from hetrl.cost.formulas import price_of
from hetrl.cost.objective import COST, Objective, rate_per_hour
from hetrl.errors import InfeasibleError, UsageError
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search import solve
from hetrl.search.infeasible import BrokenBoundsError

BUDGETS = 8
_SAME = 1e-6  # relative; plans that differ by less do the same


@dataclass(frozen=True)
class Point:
    """A plan as one buys it: its price, what it does, the GPUs to ask for; whether it is the plan at hand."""

    price_per_hour: float
    samples_per_second: float
    price_per_iteration: float
    asked: tuple[Asked, ...]
    this_plan: bool = False


@dataclass(frozen=True)
class Curve:
    """The points that no other beats, by price, and that of the plan at hand, which may be one of them."""

    points: tuple[Point, ...]
    own: Point

    @property
    def on_curve(self) -> bool:
        """Return whether no plan that was found beats the one at hand."""
        return self.own in self.points


def curve(
    plan: Plan,
    problem: Problem,
    budget_seconds: float,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
    evaluations: int | None = None,
) -> Curve:
    """Search `BUDGETS` + 1 times by sha-ea, at most `budget_seconds` each; `report` is told what for.

    `evaluations` bound each search, for a curve that can be repeated. Raises UsageError where no GPU has a price.
    """
    if not has_prices(problem.topology):
        raise UsageError("no site says what its GPUs cost; set price_per_gpu_hour in the sites' files")

    def planned(budget_per_hour: float) -> Plan:
        asked = replace(problem, objective=Objective(COST, budget_per_hour=budget_per_hour))
        return solve(asked, "sha-ea", budget_seconds, seed, evaluations=evaluations)

    report("the least price")
    topology, own = problem.topology, _point(plan, problem.topology, this_plan=True)
    least = _cheapest(topology, planned)
    found = [own, *([_point(least, topology)] if least else [])]
    for budget in _budgets(min(point.price_per_hour for point in found), topology):
        report(f"a budget of {budget:.3g} per hour")
        with suppress(InfeasibleError):  # a search as short as this may find nothing where another one did
            found.append(_point(planned(budget), topology))
    return Curve(front(found), own)


def _cheapest(topology: Topology, planned: Callable[[float], Plan]) -> Plan | None:
    """Return the plan with the least price per hour that a search finds; None where it finds none.

    Only plans on free GPUs keep a budget below the price of one that is not: the search looks for the nearest to it.
    """
    try:
        return planned(_dearer_than_free(topology) / 2)
    except BrokenBoundsError as error:
        return error.nearest
    except InfeasibleError:
        return None


def _dearer_than_free(topology: Topology) -> float:
    """Return the least price of a GPU-hour that is not free."""
    return min(node.price_per_gpu_hour for node in topology.node_by_id.values() if node.price_per_gpu_hour > 0)


def _budgets(least: float, topology: Topology) -> list[float]:
    """Return the budgets from a least price, or where it is free from that of one GPU, to the price of all GPUs."""
    least = max(least, _dearer_than_free(topology))
    most = sum(node.gpus * node.price_per_gpu_hour for node in topology.node_by_id.values())
    return [least * (most / least) ** (step / (BUDGETS - 1)) for step in range(BUDGETS)]


def _point(plan: Plan, topology: Topology, this_plan: bool = False) -> Point:
    rate, told = rate_per_hour(plan, topology), plan.predicted
    price = price_of(rate, told.iteration_seconds)
    return Point(rate, told.samples_per_second, price, asked_for(plan, topology), this_plan)


def front(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other one beats, by price; of those that do the same, the plan at hand."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda one: (one.price_per_hour, -one.samples_per_second)):
        if not kept or point.samples_per_second > kept[-1].samples_per_second * (1 + _SAME):
            kept.append(point)
        elif point.this_plan and _same(point, kept[-1]):
            kept[-1] = point
    return tuple(kept)


def _same(one: Point, other: Point) -> bool:
    pairs = (one.price_per_hour, other.price_per_hour), (one.samples_per_second, other.samples_per_second)
    return all(math.isclose(first, second, rel_tol=_SAME) for first, second in pairs)
