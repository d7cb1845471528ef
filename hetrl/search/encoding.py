"""A complete plan as one flat vector of integers, and the vectors that are legal.

With T tasks (in the workload's order) and C device classes the vector holds, one after the other:

    group    [T]      the group of each task; groups are numbered by their first task
    devices  [T, C]   how many devices of each class a group owns (row g for group g)
    classes  [T, C]   generation, inferences: which (TP, PP) option the class runs, 0 for none
                      trainings: the classes in the order of ranks and stages, of which the first `USED` count
    choice   [T, 8]   the task's other choices, below

Everything else (layers per stage, samples per replica, device ids) follows by fixed rules, so that equal devices are
never told apart. `repair` turns any vector into a legal one; what a legal vector may still break is memory and links,
which `hetrl.search.value` finds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetrl.search.jit import njit
from hetrl.search.tables import MAX_STAGES, Tables

Vector = npt.NDArray[np.int32]

# Columns of `choice`.
TENSOR = 0  # trainings: log2 of the tensor-parallel degree
PIPELINE = 1  # trainings: stages
SHAPE = 2  # trainings: how units become replicas, one of SHAPES
MICRO_BATCH = 3  # trainings: index into Tables.micro_batches
RECOMPUTE = 4  # trainings: 0 none, 1 full
SHARDING = 5  # trainings: 0 none, 1 data_parallel
IDLE = 6  # 0 resident, 1 offload, 2 sleep (generation)
USED = 7  # trainings: how many classes of the order count
CACHE = 7  # generation: index into Tables.cache_gb
CHOICES = 8

STAGES_BY_CLASS, REPLICAS_BY_CLASS, WHOLE_REPLICAS = 0, 1, 2  # each with stages of a replica side by side (+ 0) or
ALIKE = 3  # with equal stages of several replicas side by side (+ 3)
SHAPES = 6
RESIDENT, OFFLOAD, SLEEP = 0, 1, 2

# Where tables are narrow (the plan space of `hetrl.search.ilp_space`): most stages, and every so many KV caps.
NARROW_STAGES, NARROW_CACHE = 4, 4


def size_of(tables: Tables) -> int:
    """Return the length of a vector."""
    return tables.tasks * (1 + 2 * tables.classes + CHOICES)


@njit
def views(x: Vector, tasks: int, classes: int) -> Any:
    """Return group, devices, classes and choice as arrays that share the vector's memory."""
    first = tasks + tasks * classes
    second = first + tasks * classes
    return (
        x[:tasks],
        x[tasks:first].reshape((tasks, classes)),
        x[first:second].reshape((tasks, classes)),
        x[second:].reshape((tasks, CHOICES)),
    )


@njit
def repair(x: Vector, tables: Tables) -> None:
    """Make a vector legal in place: every gene within its range, groups numbered in order, devices within the classes.

    A legal vector is left as it is.
    """
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    count = _renumber(group, devices)
    _fit_devices(devices, count, tables)
    if tables.narrow:
        _even_remainders(devices, tables)
    for task in range(tables.tasks):
        alone = True
        for other in range(tables.tasks):
            alone = alone and (other == task or group[other] != group[task])
        if tables.is_training[task]:
            _repair_training(task, classes[task], choice[task], tables)
        else:
            _repair_serving(task, devices[group[task]], classes[task], choice[task], tables)
        states = 3 if task == tables.generation else 2
        choice[task, IDLE] = RESIDENT if alone else min(max(choice[task, IDLE], 0), states - 1)
        if tables.narrow and tables.is_training[task]:
            choice[task, PIPELINE] = min(choice[task, PIPELINE], NARROW_STAGES)
            _ascend(classes[task, : choice[task, USED]])
        elif tables.narrow:
            choice[task, CACHE] -= choice[task, CACHE] % NARROW_CACHE


@njit
def _ascend(values: Any) -> None:
    """Sort a few integers in place, by insertion: numba takes two seconds to compile its own sort."""
    for index in range(1, values.size):
        value, place = values[index], index
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@njit
def _even_remainders(devices: Any, tables: Tables) -> None:
    """Cut remainders of classes of several nodes to the largest power of two that shares a node out evenly."""
    for kind in range(tables.classes):
        node = tables.per_node[kind]
        for g in range(devices.shape[0] if tables.devices[kind] > node else 0):
            rest, part = devices[g, kind] % node, 1
            while 2 * part <= rest and node % (2 * part) == 0:
                part *= 2
            devices[g, kind] -= rest - min(part, rest)


@njit
def _renumber(group: Any, devices: Any) -> int:
    """Number the groups by their first task, move their rows along, and return how many there are."""
    tasks = group.size
    count = 0
    for task in range(tasks):  # most vectors are numbered already
        if group[task] == count:
            count += 1
        elif group[task] < 0 or group[task] > count:
            count = -1
            break
    if count > 0:
        devices[count:] = 0
        return count
    number = np.full(tasks, -1, np.int32)
    rows = devices.copy()
    count = 0
    for task in range(tasks):
        label = min(max(group[task], 0), tasks - 1)
        if number[label] < 0:
            number[label] = count
            devices[count] = rows[label]
            count += 1
        group[task] = number[label]
    devices[count:] = 0
    return count


@njit
def _fit_devices(devices: Any, count: int, tables: Tables) -> None:
    """Cut what is too much of each class, and remainders that would be torn over two nodes."""
    for kind in range(tables.classes):
        left = tables.devices[kind]
        for g in range(count):
            devices[g, kind] = min(max(devices[g, kind], 0), left)
            left -= devices[g, kind]
        _fit_remainders(devices[:count, kind], tables.per_node[kind], tables.devices[kind])


@njit
def _fit_remainders(column: Any, node: int, total: int) -> None:
    """Drop the remainders (devices beyond whole nodes) that find no node: largest first, each into the first room."""
    free, torn = total // node, 0
    for g in range(column.size):
        free -= column[g] // node
        torn += int(column[g] % node > 0)
    if torn <= free:
        return
    rooms = np.zeros(column.size, np.int64)
    opened = 0
    done = np.zeros(column.size, np.bool_)
    for _ in range(column.size):
        largest = -1
        for g in range(column.size):
            if not done[g] and (largest < 0 or column[g] % node > column[largest] % node):
                largest = g
        done[largest] = True
        rest = column[largest] % node
        if rest == 0:
            continue
        place = 0
        while place < opened and rooms[place] < rest:
            place += 1
        if place == opened:
            if opened == free:
                column[largest] -= rest
                continue
            rooms[place] = node
            opened += 1
        rooms[place] -= rest


@njit
def _repair_training(task: int, order: Any, choice: Any, tables: Tables) -> None:
    kinds = tables.classes
    seen = np.zeros(kinds, np.bool_)
    for position in range(kinds):
        if order[position] < 0 or order[position] >= kinds or seen[order[position]]:
            order[position] = -1
        else:
            seen[order[position]] = True
    following = 0
    for position in range(kinds):
        if order[position] < 0:
            while seen[following]:
                following += 1
            order[position] = following
            seen[following] = True
    choice[TENSOR] = min(max(choice[TENSOR], 0), tables.training.most_tensor[task])
    choice[PIPELINE] = min(max(choice[PIPELINE], 1), min(MAX_STAGES, tables.layers[task]))
    choice[SHAPE] = min(max(choice[SHAPE], 0), SHAPES - 1)
    choice[MICRO_BATCH] = min(max(choice[MICRO_BATCH], 0), tables.training.micro_batches.size - 1)
    choice[RECOMPUTE] = min(max(choice[RECOMPUTE], 0), 1)
    choice[SHARDING] = min(max(choice[SHARDING], 0), 1)
    choice[USED] = min(max(choice[USED], 1), kinds)


@njit
def _repair_serving(task: int, devices: Any, options: Any, choice: Any, tables: Tables) -> None:
    """Keep options that exist; where no class with devices runs the task, all that can do so take their first."""
    runs = False
    for kind in range(tables.classes):
        options[kind] = min(max(options[kind], 0), tables.serving.options[task, kind])
        runs = runs or (options[kind] > 0 and devices[kind] > 0)
    for kind in range(tables.classes):
        if not runs and devices[kind] > 0:
            options[kind] = min(1, tables.serving.options[task, kind])
    for unused in range(IDLE):
        choice[unused] = 0
    if task == tables.generation:
        choice[CACHE] = min(max(choice[CACHE], 0), tables.serving.cache_gb.size - 1)
    else:
        choice[CACHE] = 0


def bounds(tables: Tables) -> tuple[Vector, Vector]:
    """Return the least and the largest value of each gene, both inclusive."""
    low = np.zeros(size_of(tables), np.int32)
    high = np.zeros(size_of(tables), np.int32)
    group, devices, classes, choice = views(high, tables.tasks, tables.classes)
    group[:] = tables.tasks - 1
    devices[:] = tables.devices
    lowest = views(low, tables.tasks, tables.classes)[3]
    for task in range(tables.tasks):
        if not tables.is_training[task]:
            classes[task] = tables.serving.options[task]
            choice[task, IDLE] = 2 if task == tables.generation else 1
            choice[task, CACHE] = tables.serving.cache_gb.size - 1 if task == tables.generation else 0
            continue
        classes[task] = tables.classes - 1
        lowest[task, PIPELINE] = lowest[task, USED] = 1
        stages = min(MAX_STAGES, int(tables.layers[task]))
        last_micro_batch = tables.training.micro_batches.size - 1
        choice[task] = (
            tables.training.most_tensor[task],
            stages,
            SHAPES - 1,
            last_micro_batch,
            1,
            1,
            1,
            tables.classes,
        )
    return low, high
