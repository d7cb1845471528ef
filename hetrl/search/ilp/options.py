"""Every task's options on every allotment, without those that another option is nowhere worse than."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from hetrl.search.core.encoding import CHOICES, views
from hetrl.search.core.functions import value_options
from hetrl.search.core.ilp_states import BLOCKS, CHAIN, INFERENCES, SECONDS, TRAINING, TRANSFER
from hetrl.search.core.workspace import VALUED
from hetrl.search.evaluate import Evaluator
from hetrl.search.ilp.space import Floats, Genes, Ints, device_counts, genes_of, pareto


class Options(NamedTuple):
    """The options of one task: those of allotment a are the rows `first[a]` to `first[a + 1]`."""

    numbers: Floats  # [row, SECONDS + BLOCKS x classes], see `ilp_space`
    genes: Genes  # [row, classes + CHOICES]
    first: Ints  # [allotments + 1]


class Menu(NamedTuple):
    """What the columns are made of."""

    allotments: Ints  # [a, class], the last class fastest; a = 0 is empty
    counts: list[Ints]  # [class] the numbers of devices to choose from
    options: list[Options]  # of each task
    least: Floats  # [task, a] seconds of the fastest option on at most these devices


class UnfinishedError(Exception):
    """The program cannot be written down within the time or the memory at hand."""


def read_menu(evaluator: Evaluator, limit: float, deadline: float) -> Menu:
    """Return all options of an iteration no longer than `limit` seconds; raises UnfinishedError after the deadline."""
    counts = device_counts(evaluator.space)
    allotments = np.array([*product(*counts)], np.int64)
    trainer = evaluator.tables.trainer  # first: the pause of generation depends on the weights that it sends
    order = sorted(range(evaluator.tables.tasks), key=lambda task: task != trainer)
    found = {task: _task_options(task, allotments, evaluator, limit, deadline) for task in order}
    options = [found[task] for task in sorted(found)]
    least = np.array([_least(task, [len(some) for some in counts]) for task in options])
    return Menu(allotments, counts, options, least)


def _task_options(task: int, allotments: Ints, evaluator: Evaluator, limit: float, deadline: float) -> Options:
    """Return the options of a task; of an allotment those that use all its classes, or some."""
    tables = evaluator.tables
    menu = cache(lambda used: genes_of(task, used, tables))
    width = SECONDS + BLOCKS * tables.classes
    whole: dict[tuple[int, ...], tuple[Floats, Genes]] = {}
    found, first = [(np.zeros((0, width)), np.zeros((0, tables.classes + CHOICES), np.int32))], [0]
    for row in map(tuple, allotments.tolist()):
        if time.monotonic() > deadline:
            raise UnfinishedError
        if any(row):
            genes = menu(tuple(kind for kind, count in enumerate(row) if count))
            numbers = _value(task, row, genes, evaluator)
            if task == tables.generation and tables.staleness:
                numbers = _chained(numbers, limit)
            places = pareto(numbers, limit)
            whole[row] = numbers[places], genes[places]
            found.append(_joined([whole[part] for part in _parts(row)], limit))
        first.append(first[-1] + (len(found[-1][0]) if any(row) else 0))
    numbers_of, genes_of_rows = zip(*found, strict=True)
    return Options(np.concatenate(numbers_of), np.concatenate(genes_of_rows), np.array(first, np.int64))


def _chained(numbers: Floats, limit: float) -> Floats:
    """Return the options of generation with their chains: `hetrl.cost.cycle.batch_seconds` where it is least.

    That is in the longest period, `limit`, in which generation stops for the pause of a version alone, and where
    batches come evenly.
    """
    found = numbers.copy()
    whole, shared, pause = (numbers[:, column] for column in (INFERENCES, TRAINING, TRANSFER))
    running = np.maximum(limit - pause, 1e-9 * limit)
    found[:, CHAIN] *= running / np.maximum(running - shared, 1e-9 * limit)
    found[:, CHAIN] = np.maximum(found[:, CHAIN], whole)
    found[:, [INFERENCES, TRAINING, TRANSFER]] = 0.0
    return found


def _parts(row: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the allotment with some of its classes left out, all of them first."""
    used = [kind for kind, count in enumerate(row) if count]
    for size in range(len(used), 0, -1):
        for kept in combinations(used, size):
            yield tuple(count if kind in kept else 0 for kind, count in enumerate(row))


def _joined(parts: list[tuple[Floats, Genes]], limit: float) -> tuple[Floats, Genes]:
    if len(parts) == 1:
        return parts[0]
    numbers, genes = (np.concatenate(some) for some in zip(*parts, strict=True))
    places = pareto(numbers, limit)
    return numbers[places], genes[places]


def _value(task: int, row: tuple[int, ...], genes: Genes, evaluator: Evaluator) -> Floats:
    """Return the numbers of options on an allotment."""
    tables = evaluator.tables
    numbers = np.zeros((len(genes), SECONDS + BLOCKS * tables.classes))
    x = np.zeros(evaluator.size, np.int32)
    views(x, tables.tasks, tables.classes)[1][0] = row
    place = np.zeros(1, np.int64)
    while (missing := value_options(task, x, genes, place, *evaluator.bench.pointers, numbers)) != VALUED:
        evaluator.rows.fill(tables.serving, missing)
    return numbers


def _least(options: Options, sizes: list[int]) -> Floats:
    """Return, for each allotment, the seconds of the fastest option on at most its devices."""
    best = np.full(len(options.first) - 1, np.inf)
    owner = np.repeat(np.arange(best.size), np.diff(options.first))
    np.minimum.at(best, owner, options.numbers[:, :CHAIN].max(axis=1))
    grid = best.reshape(sizes)
    for axis in range(grid.ndim):
        grid = np.minimum.accumulate(grid, axis=axis)
    return grid.ravel()
