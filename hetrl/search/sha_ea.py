"""sha-ea: nested successive halving over groupings and device counts, evolution below (HetRL, arXiv 2512.12476, s. 4).

    anneal a few chains of random groupings, to have a good plan early                (`sketch`)
    budget = START
    until the time or the evaluations are spent:
        arms = every set partition of the tasks                                      (level 1)
        each arm: a few populations, each dealt its own device counts                (level 2)
        while more than one arm is left:
            evolve each population by `budget` children                              (levels 3 to 5, `evolve`)
            keep the better half of the arms, each with its better half of populations
            budget = 2 x budget
        put the best of its last `FINALISTS` arms into the ladder: chains, each of one temperature, which later halvings
        find as this one leaves them                                                 (`_carry`)
        temper the ladder, groupings changing, too: TEMPERED times the evaluations that the halving took   (`exchange`)
        try every single change of the best                                           (`polish`)
        START = 2 x START

The best of all is kept. The search ends by itself after `PATIENCE` halvings in a row that found nothing better (the
first `EARLY` do not count). The clock is read only to stop: with a bound on evaluations the same seed gives the same
plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TypeVar

import numpy as np

from hetrl.plan.plan import Plan
from hetrl.search.assemble import Made
from hetrl.search.by_sites import find
from hetrl.search.core.records import Packed, Words1
from hetrl.search.core.workspace import INFEASIBLE, Population, new_population, seeded
from hetrl.search.evaluate import Evaluator
from hetrl.search.infeasible import explain_broken_bounds, explain_infeasible
from hetrl.search.limits import Best, Limits, Progress, Search
from hetrl.search.polish import polish
from hetrl.search.robust import HOME_SHARE, chosen, may_cross
from hetrl.search.space import Grouping, Space, set_partitions

START = 4  # children of a population in the first round
POPULATIONS = 2
CANDIDATES = 12
EARLY, PATIENCE = 4, 4  # halvings: too short to end a search, and without anything better
# Annealing; docs/decisions.md ("The last candidates are tempered") has the other values that were tried.
TEMPERED = 40
FINALISTS, CARRIED = 4, 8  # arms, and how many of their candidates take the places of the ladder's hottest chains
HOT, ROUND = 0.015, 600  # the hottest chain's temperature, as a share of the value; children between two exchanges
SKETCHES, SKETCHED, SKETCHED_HOT = (4000, 6000, 9000), 2, 0.1  # evaluations, chains, their first temperature,
COOLING = 32  # and the steps in which it falls
LAST, LAST_SECONDS = 3000, 0.05  # evaluations for the last single changes, at most half of all; share of the time
REGROUP = 0.1  # share of the changes that change the grouping

Arm = list[Packed[Population]]  # one grouping: its populations that are still alive
Alive = TypeVar("Alive")


def _best_value(population: Packed[Population]) -> float:
    return float(population.values.value.min())


def _better_half(some: list[Alive], value: Callable[[Alive], float]) -> list[Alive]:
    return sorted(some, key=value)[: (len(some) + 1) // 2]


def groupings(tasks: tuple[str, ...], excluded: Grouping | None = None) -> list[list[int]]:
    """Return every set partition as the group of each task, numbered by their first task; few groups first.

    `excluded` is left out, in whatever order its groups and their tasks are.
    """
    found = []
    left_out = set(map(frozenset, excluded or ()))
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
    robust: float = 0.0,
) -> tuple[Plan, int]:
    """Return the best plan found by a method (`search` without one) in so many processes, and how many were valued.

    The time of the search begins when the problem's numbers are read. An interrupt (Ctrl-C) ends it; it is passed on
    where no feasible plan was found yet. Raises InfeasibleError where nothing was found. `narrow` keeps to the plan
    space of the integer program (docs/ilp.md), where all used sites are linked with each other. With `robust`, the
    share that links may give less, a training crosses them only where that is worth it (`hetrl.search.robust`): a part
    of the time goes to plans in which none does.
    """
    method = method or search
    asked = partial(find, seed=made.seed, report=report, method=method, narrow=narrow, processes=processes)
    home_share = HOME_SHARE if robust > 0 and may_cross(space) else 0.0
    at_home = None if evaluations is None else int(home_share * evaluations)
    anywhere = None if evaluations is None or at_home is None else evaluations - at_home
    found = [asked(space, (1 - home_share) * budget_seconds, evaluations=anywhere)]
    if home_share and not found[0].interrupted:
        found.append(asked(replace(space, home=True), home_share * budget_seconds, evaluations=at_home))
    compared = sum(one.compared for one in found)
    if any(one.interrupted for one in found) and all(one.best.seconds == np.inf for one in found):
        raise KeyboardInterrupt
    plans = [one.assembled(made) for one in found if one.best.value < INFEASIBLE]
    if plans:
        return (plans[0] if len(plans) == 1 else chosen(plans[0], plans[1], space.problem, robust)), compared
    nearest = min(found, key=lambda one: one.best.value)
    if nearest.winner is not None:
        raise explain_broken_bounds(nearest.winner.assemble(nearest.best.x, made), space.problem)
    if evaluations is None or any(one.late for one in found):
        raise explain_infeasible(space, f"within {budget_seconds:g} s", "planner.budget_seconds", compared)
    raise explain_infeasible(space, f"in {evaluations:,} evaluations", "planner.evaluations", compared)


def search(evaluator: Evaluator, limits: Limits, seed: int, report: Callable[[Progress], None] | None = None) -> Best:
    """Return the best candidate found; its seconds are infinite where nothing is feasible.

    An interrupt (Ctrl-C) ends the search early.
    """
    best, improved = Best(), 0
    known = groupings(evaluator.space.problem.workload.tasks, evaluator.space.excluded)
    ladder = new_population(evaluator.tables, evaluator.bench.parts, known[0], CANDIDATES)
    run = _Run(evaluator, _first(limits), seeded(seed), best, report or (lambda progress: None), known, ladder)
    try:
        going = run.sketch()
        polish(best, evaluator, limits)
        for restart in count():
            before = best.value
            going = going and run.halve(START << restart)
            polish(best, evaluator, limits)
            if not going and limits.left(evaluator.evaluations):  # what the last changes have not used
                run, going = replace(run, limits=limits), True
            improved = restart if best.value < before else improved
            if not going or restart - max(improved, EARLY) >= PATIENCE:
                break
    except KeyboardInterrupt:
        best.interrupted = True
    return best


def _first(limits: Limits) -> Limits:
    """Return the limits of all but the last single changes."""
    kept = LAST_SECONDS * max(limits.deadline - time.monotonic(), 0.0)
    bound = limits.evaluations
    fewer = None if bound is None else bound - min(LAST, bound // 2)
    return replace(limits, deadline=limits.deadline - kept, evaluations=fewer)


@dataclass(frozen=True)
class _Run:
    """A search under way; its steps return False where a limit ended them."""

    evaluator: Evaluator
    limits: Limits
    state: Words1
    best: Best
    report: Callable[[Progress], None]
    groupings: list[list[int]]  # that are not excluded; the group of each task
    ladder: Packed[Population]  # changed in place; the coldest chain first

    def halve(self, budget: int) -> bool:
        """Run one whole halving, then temper the ladder with what is left of it."""
        tables, parts = self.evaluator.tables, self.evaluator.bench.parts
        began, finalists = self.evaluator.evaluations, list[Population]()
        arms: list[Arm] = [
            [new_population(tables, parts, group, CANDIDATES) for _ in range(POPULATIONS)] for group in self.groupings
        ]
        while True:
            if len(arms) <= FINALISTS and not finalists:
                finalists = [arm[0].values for arm in arms]
            going = all(self._evolve(population, budget) for arm in arms for population in arm)
            self._note(arms)
            if not going:
                return False
            self.report(Progress(self.best.seconds, self.evaluator.evaluations, len(arms)))
            if len(arms) == 1:
                self._carry(finalists)
                return self._temper(TEMPERED * (self.evaluator.evaluations - began))
            kept = _better_half(arms, lambda arm: min(map(_best_value, arm)))
            arms = [_better_half(arm, _best_value) for arm in kept]
            budget *= 2

    def sketch(self) -> bool:
        """Anneal a few chains of any grouping, again and again for longer: a good plan before a halving has one.

        The ladder is filled first: later, too few plans of a tiny problem may be left that were not met.
        """
        if not self._evolve(self.ladder, CANDIDATES):
            return False
        tables, parts = self.evaluator.tables, self.evaluator.bench.parts
        known = self.groupings
        for budget in SKETCHES:
            chains = new_population(tables, parts, known[int(self.state[0]) % len(known)], SKETCHED)
            if not self._anneal(chains, budget // COOLING, SKETCHED_HOT):
                return False
        return True

    def _carry(self, finalists: list[Population]) -> None:
        """Put the best of the last arms into the places of the ladder's hottest chains."""
        ladder, place = self.ladder.values, CANDIDATES - 1
        for last in finalists:
            for one in np.argsort(last.value[: int(last.counters[0])])[: CARRIED // len(finalists)]:
                ladder.x[place], ladder.value[place] = last.x[one], last.value[one]
                ladder.floats[place], ladder.ints[place] = last.floats[one], last.ints[one]
                place -= 1

    def _temper(self, budget: int) -> bool:
        """Anneal the ladder by so many children, neighbours changing places now and then."""
        for left in range(budget, 0, -ROUND):
            going = self._evolve(self.ladder, min(left, ROUND), self._regroup, HOT)
            self.evaluator.exchange(self.ladder, HOT, self.state)
            if not self._told(self.ladder, going):
                return False
        return True

    def _anneal(self, population: Packed[Population], children: int, hot: float) -> bool:
        """Anneal a population by so many children at each temperature, its groupings changing."""
        for step in range(COOLING):
            going = self._evolve(population, children, self._regroup, hot * (1 - step / COOLING) ** 2)
            if not self._told(population, going):
                return False
        return True

    def _told(self, population: Packed[Population], going: bool) -> bool:
        """Note an annealed population's best and, unless a limit has ended it, report; return whether it goes on."""
        self._note([[population]])
        if going:
            self.report(Progress(self.best.seconds, self.evaluator.evaluations, 1))
        return going

    @property
    def _regroup(self) -> float:
        """Return the share of changes of the grouping: none where one that is left out might come back this way."""
        return REGROUP if self.evaluator.space.excluded is None else 0.0

    def _evolve(
        self, population: Packed[Population], budget: int, regroup: float = 0.0, temperature: float = 0.0
    ) -> bool:
        """Evolve a population by so many children."""
        while budget > 0:
            children = min(budget, self.limits.left(self.evaluator.evaluations))
            if children == 0:
                return False
            self.evaluator.evolve(population, children, self.state, regroup, temperature)
            budget -= children
        return True

    def _note(self, arms: list[Arm]) -> None:
        for arm in arms:
            for population in arm:
                if _best_value(population) < np.inf:  # no child has been valued otherwise
                    x = population.values.x[int(population.values.value.argmin())]
                    self.best.offer(self.evaluator.graded(x), x, self.evaluator)
