"""A plain evolutionary search with the DEAP library, in the encoding, with the repair and the evaluator of sha-ea.

    population = POPULATION random legal vectors
    until the time or the evaluations are spent
        offspring = OFFSPRING children of random parents: crossover of two, or mutation of one     (DEAP's varOr)
        repair and value the children
        population = POPULATION winners of tournaments among population and offspring

The best ever met is kept apart. It knows nothing of levels, of halving, or of which genes belong together. Source: DEAP
(Fortin et al., JMLR 13, 2012), its (mu + lambda) algorithm `eaMuPlusLambda`, generation by generation so that a budget
can end it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from hetrl.errors import UsageError
from hetrl.plan.plan import Plan
from hetrl.search import sha_ea
from hetrl.search.assemble import Made
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Best, Limits, Progress
from hetrl.search.space import Space

# Crossover and tournament as in DEAP's examples, the population is the best of three: docs/baselines.md.
POPULATION = 200
OFFSPRING = 400
CROSSOVER = 0.5  # of the children; the others are mutated
GENES_MUTATED = 3.0  # of a vector, on average
TOURNAMENT = 3
TUNING = (
    f"DEAP's (mu + lambda) search, {POPULATION} + {OFFSPRING}, crossover {CROSSOVER:.0%}, {GENES_MUTATED:g} genes per "
    f"mutation, tournaments of {TOURNAMENT}; encoding, repair and evaluator are those of sha-ea"
)


class Individual(array):  # type: ignore[type-arg]
    """A vector with DEAP's fitness."""

    fitness: Any

    def copy(self) -> Individual:
        """Return a copy: what DEAP's operators change in place."""
        twin = Individual("i", self)
        twin.fitness = type(self.fitness)(self.fitness.values)
        return twin


def plan(
    space: Space,
    budget_seconds: float,
    made: Made,
    evaluations: int | None = None,
    report: Callable[[Progress], None] | None = None,
) -> tuple[Plan, int]:
    """Return the best plan found and how many were valued.

    Raises UsageError where DEAP is not installed, InfeasibleError where nothing was found.
    """
    _library("base")  # before anything is compiled
    return sha_ea.plan(space, budget_seconds, made, evaluations, report, method=search)


def search(evaluator: Evaluator, limits: Limits, seed: int, report: Callable[[Progress], None] | None = None) -> Best:
    """Return the best plan found; its seconds are infinite where nothing is feasible.

    An interrupt (Ctrl-C) ends the search early. Raises UsageError where DEAP is not installed.
    """
    algorithms, best = _library("algorithms"), Best()
    with _seeded(seed):
        toolbox = _toolbox(evaluator)
        population: list[Individual] = []
        children = toolbox.population(POPULATION)
        try:
            while limits.left(evaluator.evaluations):
                _value((child for child in children if not child.fitness.valid), evaluator, best)
                if report is not None:
                    report(Progress(best.seconds, evaluator.evaluations, 1))
                population = toolbox.select(population + children, POPULATION)
                children = algorithms.varOr(population, toolbox, OFFSPRING, CROSSOVER, 1 - CROSSOVER)
        except KeyboardInterrupt:
            best.interrupted = True
    return best


def _library(module: str) -> Any:
    try:
        return import_module(f"deap.{module}")
    except ImportError:
        raise UsageError(
            "planner.solver deap needs the DEAP library; `pip install deap==1.4.3`, or choose another solver"
        ) from None


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed Python's own generator, the one that DEAP draws from, and restore it afterwards."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _toolbox(evaluator: Evaluator) -> Any:
    """Return DEAP's toolbox: how individuals are made, copied, crossed, mutated and selected."""
    base, tools = _library("base"), _library("tools")
    fitness = type("Fitness", (base.Fitness,), {"weights": (-1.0,)})  # the less, the better

    def individual() -> Individual:
        made = Individual("i", evaluator.random(random.getrandbits(62)).tolist())
        made.fitness = fitness()
        return made

    low, high = (bound.tolist() for bound in evaluator.bounds)
    toolbox = base.Toolbox()
    toolbox.register("population", tools.initRepeat, list, individual)
    toolbox.register("clone", Individual.copy)
    toolbox.register("mate", tools.cxTwoPoint)
    toolbox.register("mutate", tools.mutUniformInt, low=low, up=high, indpb=min(GENES_MUTATED / len(low), 1.0))
    toolbox.register("select", tools.selTournament, tournsize=TOURNAMENT)
    return toolbox


def _value(individuals: Iterable[Individual], evaluator: Evaluator, best: Best) -> None:
    """Repair the individuals in place and give each its fitness: graded where it is not feasible."""
    for individual in individuals:
        x = np.frombuffer(individual, np.int32)  # shares the memory
        evaluator.repair(x)
        value = evaluator.graded(x)
        individual.fitness.values = (value,)
        best.offer(value, x, evaluator)
