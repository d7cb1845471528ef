"""A search in each set of sites that one site can lead, for the controller reaches no others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hetrl.cost.objective import plan_value
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search.assemble import Made, finish
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Best, Limits, Progress, Search
from hetrl.search.processes import search_apart
from hetrl.search.space import Space, linked_sets, stars

_EQUAL = 1e-9  # what rounding may make of equal values


@dataclass(frozen=True)
class Found:
    """The best candidate of a space, whose evaluator is the `winner`; `late`: the time was over."""

    best: Best
    winner: Evaluator | None
    compared: int
    interrupted: bool
    late: bool

    def assembled(self, made: Made) -> Plan:
        """Return the plan of a candidate that is feasible."""
        assert self.winner is not None
        whole = self.winner.assemble(self.best.x, made)
        return whole if self.winner.narrow else _parted(whole, self.winner.space.problem, made)


def find(
    space: Space,
    budget_seconds: float,
    seed: int,
    evaluations: int | None,
    report: Callable[[Progress], None] | None,
    method: Search,
    narrow: bool,
    processes: int,
) -> Found:
    """Search each set of sites that one site can lead by itself (one set, where all sites are linked)."""
    compared, best, winner, interrupted = 0, Best(), None, False
    joined = linked_sets if narrow else stars
    sets = [some for some in joined(space.problem.topology) if _has_all_engines(replace(space, sites=some))]
    deadline = time.monotonic() + budget_seconds
    for index, sites in enumerate(sets):
        evaluator = Evaluator(replace(space, sites=sites), narrow)
        if index == 0:
            deadline = time.monotonic() + budget_seconds
        now, parts = time.monotonic(), len(sets) - index
        bound = None if evaluations is None else (evaluations - compared) // parts
        limits = Limits(now + (deadline - now) / parts, bound)
        if processes > 1:
            found, valued = search_apart(method, evaluator, limits, seed, processes, report)
        else:
            found = method(evaluator, limits, seed, report)
            valued = evaluator.evaluations
        compared += valued
        if found.value < best.value:
            best, winner = found, evaluator
        if interrupted := found.interrupted:
            break
    return Found(best, winner, compared, interrupted, time.monotonic() >= deadline)


def _parted(whole: Plan, problem: Problem, made: Made) -> Plan:
    """Return the plan, with groups split unless that is worse: tasks that share no device need not take turns.

    Where nothing is gained by it, rollouts that are a group of their own can still start as an array.
    """
    groups = [{name: whole.tasks[name] for name in group.tasks} for group in whole.groups]
    parted = finish(problem, groups, made)
    values = [plan_value(plan, problem.topology, problem.objective) for plan in (parted, whole)]
    return parted if values[0] <= values[1] * (1 + _EQUAL) else whole


def _has_all_engines(space: Space) -> bool:
    kinds = range(len(space.classes))
    return all(any(space.usable(task, kind) for kind in kinds) for task in space.problem.workload.tasks)
