"""sha-ea: nested successive halving over groupings and device counts, evolution below (HetRL, arXiv 2512.12476, s. 4).

    budget = START
    until the time or the evaluations are spent:
        arms = every set partition of the tasks                                      (level 1)
        each arm: a few populations, each dealt its own device counts                (level 2)
        while more than one arm is left:
            evolve each population by `budget` children                              (levels 3 to 5, `evolve`)
            keep the better half of the arms, each with its better half of populations
            budget = 2 x budget
        anneal what is left, its grouping changing, too: POLISH times the evaluations that the halving took
        START = 2 x START

The best of all is kept. The search ends by itself after `PATIENCE` halvings in a row that found nothing better. The
clock is read only to stop: with a bound on evaluations the same seed gives the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np

from hetrl.cost.objective import plan_value
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search.assemble import Made, finish
from hetrl.search.core.records import Packed, Words1
from hetrl.search.core.workspace import INFEASIBLE, Population, new_population, seeded
from hetrl.search.evaluate import Evaluator
from hetrl.search.infeasible import explain_broken_bounds, explain_infeasible
from hetrl.search.limits import Best, Limits, Progress, Search
from hetrl.search.processes import search_apart
from hetrl.search.space import Grouping, Space, linked_sets, set_partitions, stars

START = 16
POPULATIONS = 4
CANDIDATES = 12
PATIENCE = 4
POLISH = 4
REGROUP = 0.1  # share of the changes that change the grouping, while polishing
HOT, COOLING = 0.03, 32  # first temperature, as a share of the value, and the steps in which it falls
_EQUAL = 1e-9  # what rounding may make of equal values


class Arm:
    """One grouping with the populations that are still alive."""

    def __init__(self, evaluator: Evaluator, group: list[int], populations: int) -> None:
        """Start with empty populations."""
        tables, parts = evaluator.tables, evaluator.bench.parts
        self.populations = [new_population(tables, parts, group, CANDIDATES) for _ in range(populations)]

    @property
    def value(self) -> float:
        """Return the objective of the arm's best candidate."""
        return min(map(_best_value, self.populations))

    def halve(self) -> None:
        """Keep the better half of the populations."""
        self.populations.sort(key=_best_value)
        del self.populations[max((len(self.populations) + 1) // 2, 1) :]


def _best_value(population: Packed[Population]) -> float:
    return float(population.values.value.min())


def groupings(tasks: tuple[str, ...], excluded: Grouping | None = None) -> list[list[int]]:
    """Return every set partition as the group of each task, numbered by their first task; few groups first.

    `excluded` is left out, in whatever order its groups and their tasks are.
    """
    found = []
    left_out = None if excluded is None else set(map(frozenset, excluded))
    for partition in sorted(set_partitions(tasks), key=len):
        if set(map(frozenset, partition)) == left_out:
            continue
        owner = {task: index for index, block in enumerate(partition) for task in block}
        first = list(dict.fromkeys(owner[task] for task in tasks))
        found.append([first.index(owner[task]) for task in tasks])
    return found


def plan(
    space: Space,
    budget_seconds: float,
    made: Made,
    evaluations: int | None = None,
    report: Callable[[Progress], None] | None = None,
    method: Search | None = None,
    narrow: bool = False,
    processes: int = 1,
) -> tuple[Plan, int]:
    """Return the best plan found by a method (`search` without one) in so many processes, and how many were valued.

    Each set of sites that one site can lead is searched by itself (one set, where all sites are linked). Raises
    InfeasibleError where nothing was found. The time of the search begins when the problem's numbers are read. An
    interrupt (Ctrl-C) ends it; it is passed on where no feasible plan was found yet. `narrow` keeps to the plan space
    of the integer program (docs/ilp.md), where all used sites are linked with each other.
    """
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
            found, valued = search_apart(method or search, evaluator, limits, made.seed, processes, report)
        else:
            found = (method or search)(evaluator, limits, made.seed, report)
            valued = evaluator.evaluations
        compared += valued
        if found.value < best.value:
            best, winner = found, evaluator
        if interrupted := found.interrupted:
            break
    if interrupted and best.seconds == np.inf:
        raise KeyboardInterrupt
    if winner is None:
        raise explain_infeasible(space, budget_seconds)
    whole = winner.assemble(best.x, made)
    if best.value >= INFEASIBLE:
        raise explain_broken_bounds(whole, space.problem)
    return (whole if narrow else _parted(whole, space.problem, made)), compared


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


def search(evaluator: Evaluator, limits: Limits, seed: int, report: Callable[[Progress], None] | None = None) -> Best:
    """Return the best candidate found; its seconds are infinite where nothing is feasible.

    An interrupt (Ctrl-C) ends the search early.
    """
    state, best, improved = seeded(seed), Best(), 0
    try:
        for restart in count():
            before = best.value
            if not _halve(evaluator, limits, START << restart, state, best, report):
                break
            improved = restart if best.value < before else improved
            if restart - improved >= PATIENCE:
                break
    except KeyboardInterrupt:
        best.interrupted = True
    return best


def _halve(
    evaluator: Evaluator,
    limits: Limits,
    budget: int,
    state: Words1,
    best: Best,
    report: Callable[[Progress], None] | None,
) -> bool:
    """Run one whole halving; False where a limit ended it."""
    space, began = evaluator.space, evaluator.evaluations
    arms = [Arm(evaluator, group, POPULATIONS) for group in groupings(space.problem.workload.tasks, space.excluded)]
    while True:
        for arm in arms:
            for population in arm.populations:
                if not _evolve(evaluator, population, budget, limits, state):
                    _note(arms, best, evaluator)
                    return False
        _note(arms, best, evaluator)
        if report is not None:
            report(Progress(best.seconds, evaluator.evaluations, len(arms)))
        if len(arms) == 1:
            spent = evaluator.evaluations - began
            return _polish(evaluator, arms[0], POLISH * spent, limits, state, best, report)
        arms = sorted(arms, key=lambda arm: arm.value)[: (len(arms) + 1) // 2]
        for arm in arms:
            arm.halve()
        budget *= 2


def _polish(
    evaluator: Evaluator,
    arm: Arm,
    budget: int,
    limits: Limits,
    state: Words1,
    best: Best,
    report: Callable[[Progress], None] | None,
) -> bool:
    """Anneal what is left of the last arm, by so many children; False where a limit ended it.

    A grouping that `Space.excluded` leaves out must not come back this way: with one, groupings stay.
    """
    regroup = REGROUP if evaluator.space.excluded is None else 0.0
    children = budget // len(arm.populations) // COOLING
    for population in arm.populations:
        for step in range(COOLING):
            temperature = HOT * (1 - step / COOLING) ** 2
            going = _evolve(evaluator, population, children, limits, state, regroup, temperature)
            _note([arm], best, evaluator)
            if not going:
                return False
            if report is not None:
                report(Progress(best.seconds, evaluator.evaluations, 1))
    return True


def _evolve(
    evaluator: Evaluator,
    population: Packed[Population],
    budget: int,
    limits: Limits,
    state: Words1,
    regroup: float = 0.0,
    temperature: float = 0.0,
) -> bool:
    """Evolve a population by so many children; False where a limit was met."""
    while budget > 0:
        children = min(budget, limits.left(evaluator.evaluations))
        if children == 0:
            return False
        evaluator.evolve(population, children, state, regroup, temperature)
        budget -= children
    return True


def _note(arms: list[Arm], best: Best, evaluator: Evaluator) -> None:
    for arm in arms:
        for population in arm.populations:
            place = int(population.values.value.argmin())
            best.offer(float(population.values.value[place]), population.values.x[place], evaluator)
