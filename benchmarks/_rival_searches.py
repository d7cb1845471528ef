"""Searches of other planners with sha-ea's evaluator and changes: what its own structure is worth.

anneal   one chain of simulated annealing, cooled geometrically over the evaluations it has
mcmc     Metropolis-Hastings at one temperature, as ReaL searches (arXiv 2406.14088)
ga       a population whose children mix two parents and are improved a few times, as DT-FM's (arXiv 2206.01288)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np

from hetrl.search.core.encoding import Vector, views
from hetrl.search.core.functions import regroup
from hetrl.search.core.workspace import seeded
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Best, Limits, Progress

DRAWS = 50  # random plans to start from
REGROUPED = 0.1  # share of the changes that change the grouping, as in sha-ea
HOT, COLD = 0.3, 0.003  # temperatures of `anneal`, as shares of the plan's seconds
STEADY = 0.01  # temperature of `mcmc`
TRIES = 3  # changes per evaluation that is allowed, at most
POPULATION, IMPROVED = 20, 20  # of `ga`: plans, and changes that each child is offered

Report = Callable[[Progress], None] | None


class _Search:
    def __init__(self, evaluator: Evaluator, limits: Limits, seed: int) -> None:
        self.evaluator, self.limits, self.best = evaluator, limits, Best()
        self.random, self.state, self.tries = Random(seed), seeded(seed), 0

    def value(self, x: Vector) -> float:
        found = self.evaluator.graded(x)
        self.best.offer(found, x, self.evaluator)
        return found

    def going(self) -> bool:
        self.tries += 1  # a walk that has converged meets hardly a plan that is not known
        return self.limits.left(self.evaluator.evaluations) > 0 and self.tries < TRIES * (self.limits.evaluations or 1)

    def spent(self) -> float:
        return self.evaluator.evaluations / (self.limits.evaluations or 1)

    def drawn(self) -> tuple[Vector, float]:
        some = [self.evaluator.random(self.random.getrandbits(32)) for _ in range(DRAWS)]
        values = [self.value(x) for x in some]
        return min(zip(some, values, strict=True), key=lambda pair: pair[1])

    def changed(self, x: Vector) -> Vector:
        if self.random.random() >= REGROUPED:
            return self.evaluator.mutate(x, self.random.getrandbits(32))
        child, tables = x.copy(), self.evaluator.bench.pointers[0]
        regroup(child, np.zeros(self.evaluator.tables.tasks, np.bool_), self.state, tables)
        return child


def _walk(search: _Search, temperature: Callable[[], float]) -> Best:
    x, value = search.drawn()
    while search.going():
        child = search.changed(x)
        found = search.value(child)
        rise = (found - value) / value
        if rise <= 0 or search.random.random() < math.exp(-rise / temperature()):
            x, value = child, found
    return search.best


def anneal(evaluator: Evaluator, limits: Limits, seed: int, report: Report = None) -> Best:
    """Cool one chain over the evaluations that the limits allow."""
    search = _Search(evaluator, limits, seed)
    return _walk(search, lambda: HOT * (COLD / HOT) ** min(search.spent(), 1.0))


def mcmc(evaluator: Evaluator, limits: Limits, seed: int, report: Report = None) -> Best:
    """Walk at one temperature."""
    return _walk(_Search(evaluator, limits, seed), lambda: STEADY)


def ga(evaluator: Evaluator, limits: Limits, seed: int, report: Report = None) -> Best:
    """Mix and improve the plans of a population; a child takes the place of the worst."""
    search = _Search(evaluator, limits, seed)
    population = [search.drawn() for _ in range(POPULATION)]
    while search.going():
        one, other = search.random.sample(population, 2)
        x = _mixed(one[0], other[0], evaluator, search.random)
        value = search.value(x)
        for _ in range(IMPROVED):
            child = search.changed(x)
            if (found := search.value(child)) <= value:
                x, value = child, found
        worst = max(range(POPULATION), key=lambda index: population[index][1])
        if value <= population[worst][1]:
            population[worst] = x, value
    return search.best


def _mixed(x: Vector, other: Vector, evaluator: Evaluator, random: Random) -> Vector:
    """Return a plan with the groups of the first parent and the tasks of either."""
    child, tables = x.copy(), evaluator.tables
    _, _, classes, choice = views(child, tables.tasks, tables.classes)
    _, _, their_classes, their_choice = views(other, tables.tasks, tables.classes)
    for task in range(tables.tasks):
        if random.random() < 0.5:
            classes[task], choice[task] = their_classes[task], their_choice[task]
    evaluator.repair(child)
    return child
