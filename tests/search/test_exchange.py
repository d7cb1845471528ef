"""Chains of neighbouring temperatures change places as replica exchange says."""

from __future__ import annotations

from math import exp, log

import numpy as np

from hetrl.search.core.records import Packed
from hetrl.search.core.workspace import Population, new_population, seeded
from hetrl.search.evaluate import Evaluator
from hetrl.search.space import Space
from tests.search.ilp_cases import problem

TEMPERATURE = 0.1


def ladder(evaluator: Evaluator, values: list[float]) -> Packed[Population]:
    """Chains of given values, the first one's temperature the least; every row says which chain it was."""
    found = new_population(evaluator.tables, evaluator.bench.parts, [0] * evaluator.tables.tasks, len(values))
    for row, value in enumerate(values):
        found.values.value[row] = value
        for part in (found.values.x, found.values.floats, found.values.ints):
            part[row] = row
    found.values.counters[0] = len(values)
    return found


def test_a_better_chain_comes_to_the_colder_place_with_all_that_is_its_own() -> None:
    evaluator = Evaluator(Space(problem(3, "grpo", "sync")))
    chains, state = ladder(evaluator, [9.0, 8.0, 1.0]), seeded(0)
    for _ in range(2):
        evaluator.exchange(chains, 1e-6, state)
    own = chains.values
    assert own.value.tolist() == [1.0, 8.0, 9.0, np.inf]
    for part in (own.x, own.floats, own.ints):
        assert part[:3, 0].tolist() == part[:3, -1].tolist() == [2, 1, 0]


def test_a_worse_chain_comes_there_as_often_as_temperatures_say() -> None:
    evaluator, trials = Evaluator(Space(problem(3, "grpo", "sync"))), 20_000
    state, exchanged = seeded(1), 0
    for _ in range(trials):
        chains = ladder(evaluator, [1.0, 1.1])
        evaluator.exchange(chains, TEMPERATURE, state)
        exchanged += chains.values.value[0] == 1.1
    expected = exp((2 / TEMPERATURE - 1 / TEMPERATURE) * log(1.0 / 1.1))  # chains of half and of the whole temperature
    assert abs(exchanged / trials - expected) < 5 * (expected * (1 - expected) / trials) ** 0.5


def test_chains_that_are_not_there_stay_out_of_it() -> None:
    evaluator = Evaluator(Space(problem(3, "grpo", "sync")))
    chains = ladder(evaluator, [9.0, 8.0, 1.0])
    chains.values.counters[0] = 2
    evaluator.exchange(chains, 1e-6, seeded(0))
    assert chains.values.value[:3].tolist() == [8.0, 9.0, 1.0]
