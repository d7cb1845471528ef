"""The last step of a search: every single change of the best candidate is tried, until none is better.

    repeat until a whole round finds nothing, or a limit is reached:
        for every change: a gene of a task, layers from one stage to another, places of two classes, the group of a
                          task, with all of that group taking turns or not, one of its own with devices of a class,
                          devices of a class from one group to another
            take it if the plan is better

The evolution changes at random, and leaves some of the small changes untried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, permutations

import numpy as np

from hetrl.search.core.encoding import CACHE, IDLE, MOVED, OFFLOAD, PIPELINE, SLEEP, Vector, views
from hetrl.search.core.tables import Tables
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Best, Limits

LAYERS = (1, 2, 4)  # moved at once from one stage to another

Views = tuple[Vector, Vector, Vector, Vector]  # as `encoding.views` returns them
Change = Callable[[Views], None]


def polish(best: Best, evaluator: Evaluator, limits: Limits) -> None:
    """Improve a candidate in place by single changes, as far as the limits allow; groupings that are excluded stay out.

    Nothing happens to one that does not fit.
    """
    improved = len(best.x) > 0
    while improved:
        improved = False
        for change in changes(best.x.copy(), evaluator):
            if limits.left(evaluator.evaluations) == 0:
                return
            x = best.x.copy()
            change(views(x, evaluator.tables.tasks, evaluator.tables.classes))
            evaluator.repair(x)
            before = best.value
            best.offer(evaluator.graded(x), x, evaluator)
            improved = improved or best.value < before


def changes(x: Vector, evaluator: Evaluator) -> Iterator[Change]:
    """Yield the changes that there are of a vector; what they change is whatever the vector is by then."""
    tables = evaluator.tables
    group, devices, _, choice = views(x, tables.tasks, tables.classes)
    low, high = (views(bound, tables.tasks, tables.classes)[3] for bound in evaluator.bounds)
    for task in range(tables.tasks):
        genes = range(MOVED) if tables.is_training[task] else (IDLE, CACHE)
        for gene in genes:
            for value in range(low[task, gene], high[task, gene] + 1):
                if value != choice[task, gene]:
                    yield _set(3, (task, gene), value)
        if tables.is_training[task]:
            yield from _moved_layers(task, int(choice[task, PIPELINE]))
            yield from (_exchanged(task, a, b) for a, b in combinations(range(tables.classes), 2))
            continue
        for kind in np.flatnonzero(devices[group[task]]):
            for option in range(tables.serving.options[task, kind] + 1):
                yield _set(2, (task, int(kind)), option)
    if evaluator.space.excluded is None:
        for task in range(tables.tasks):
            for g in range(min(int(group.max()) + 2, tables.tasks)):
                yield from (_set(0, (task,), g), _taking_turns(task, g, tables))
            yield from _parted(task, group, devices, tables)
    yield from _moved_devices(int(group.max()) + 1, devices, tables)


def _set(part: int, place: tuple[int, ...], value: int) -> Change:
    def change(x: Views) -> None:
        x[part][place] = value

    return change


def _taking_turns(task: int, g: int, tables: Tables) -> Change:
    """Return a task in another group, all of whose tasks leave the devices to the others."""

    def change(x: Views) -> None:
        x[0][task] = g
        mates = np.flatnonzero(x[0] == g)
        x[3][mates, IDLE] = np.where(mates == tables.generation, SLEEP, OFFLOAD)

    return change


def _parted(task: int, group: Vector, devices: Vector, tables: Tables) -> Iterator[Change]:
    """Yield a task in a group of its own, with some of the devices of a class of those that it leaves."""
    source, target = int(group[task]), int(group.max()) + 1
    if np.count_nonzero(group == source) == 1:
        return
    for kind in range(tables.classes):
        node = int(tables.per_node[kind])
        for amount in sorted({1, node // 2, node} - {0}):
            if amount < devices[source, kind]:
                yield _left(task, kind, source, target, amount)


def _left(task: int, kind: int, source: int, target: int, amount: int) -> Change:
    def change(x: Views) -> None:
        x[0][task] = target
        x[1][source, kind] -= amount
        x[1][target, kind] += amount

    return change


def _moved_layers(task: int, stages: int) -> Iterator[Change]:
    for source, target in permutations(range(stages), 2):
        for layers in LAYERS:
            first, last = MOVED + min(source, target), MOVED + max(source, target)
            yield _added(task, first, last, layers if source < target else -layers)


def _added(task: int, first: int, last: int, layers: int) -> Change:
    def change(x: Views) -> None:
        x[3][task, first:last] += layers

    return change


def _exchanged(task: int, a: int, b: int) -> Change:
    def change(x: Views) -> None:
        x[2][task, [a, b]] = x[2][task, [b, a]]

    return change


def _moved_devices(groups: int, devices: Vector, tables: Tables) -> Iterator[Change]:
    """Yield devices of a class from one group to another; the row behind the last group stands for the idle ones."""
    for kind in range(tables.classes):
        node = int(tables.per_node[kind])
        idle = int(tables.devices[kind] - devices[:groups, kind].sum())
        for source, target in permutations(range(groups + 1), 2):
            most = idle if source == groups else int(devices[source, kind])
            for amount in sorted({1, node // 2, node, most} - {0}):
                if amount <= most:
                    yield _shifted(kind, source, target, groups, amount, tables)


def _shifted(kind: int, source: int, target: int, groups: int, amount: int, tables: Tables) -> Change:
    def change(x: Views) -> None:
        group, devices, classes, _ = x
        if source < groups:
            devices[source, kind] -= amount
        if target < groups:
            devices[target, kind] += amount
        for task in np.flatnonzero(group == target):
            if not tables.is_training[task] and classes[task, kind] == 0:
                classes[task, kind] = min(1, tables.serving.options[task, kind])

    return change
