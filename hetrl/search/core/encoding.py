"""A complete plan as one flat vector of integers, and the vectors that are legal.

With T tasks (in the workload's order) and C device classes the vector holds, one after the other:

    group    [T]      the group of each task; groups are numbered by their first task
    devices  [T, C]   how many devices of each class a group owns (row g for group g)
    classes  [T, C]   generation, inferences: which (TP, PP) option the class runs, 0 for none
                      trainings: the classes in the order of ranks and stages, of which the first `USED` count
    choice   [T, 16]  the task's other choices, below

Everything else (samples per replica, device ids) follows by fixed rules, so that equal devices are never told apart;
layers are split by the speed of the stages, from which `MOVED` departs. `functions.repair` turns any vector into a
legal one; what a legal vector may still break is memory and links, which `functions.value` finds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetrl.plan.plan import RECOMPUTES
from hetrl.search.core.tables import MAX_STAGES, Tables

Vector = npt.NDArray[np.int32]

# Columns of `choice`.
TENSOR = 0  # trainings: log2 of the tensor-parallel degree
PIPELINE = 1  # trainings: stages
SHAPE = 2  # trainings: how units become replicas, one of SHAPES
MICRO_BATCH = 3  # trainings: index into TrainingTables.micro_batches
RECOMPUTE = 4  # trainings: index into RECOMPUTES
SHARDING = 5  # trainings: 0 none, 1 data_parallel
IDLE = 6  # 0 resident, 1 offload, 2 sleep (generation)
USED = 7  # trainings: how many classes of the order count
CACHE = 7  # generation: index into ServingTables.cache_gb
SENDER = 8  # trainings: the cohort that stands first: its first replica sends the weights
MOVED = 9  # trainings, one per stage but the last: layers that go on from it to the next one
CHOICES = MOVED + MAX_STAGES - 1

STAGES_BY_CLASS, REPLICAS_BY_CLASS, WHOLE_REPLICAS = 0, 1, 2  # each with stages of a replica side by side (+ 0) or
ALIKE = 3  # with equal stages of several replicas side by side (+ 3)
SHAPES = 6
MOST_MOVED = 8  # layers, over one boundary
MODES = len(RECOMPUTES)
RESIDENT, OFFLOAD, SLEEP = 0, 1, 2

# Where tables are narrow (the plan space of `hetrl.search.ilp.space`): most stages, and every so many KV caps.
NARROW_STAGES, NARROW_CACHE = 4, 4


def size_of(tables: Tables) -> int:
    """Return the length of a vector."""
    return tables.tasks * (1 + 2 * tables.classes + CHOICES)


def views(x: Vector, tasks: int, classes: int) -> tuple[Vector, Vector, Vector, Vector]:
    """Return group, devices, classes and choice as arrays that share the vector's memory."""
    first = tasks + tasks * classes
    second = first + tasks * classes
    return (
        x[:tasks],
        x[tasks:first].reshape((tasks, classes)),
        x[first:second].reshape((tasks, classes)),
        x[second:].reshape((tasks, CHOICES)),
    )


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
        tensor, stages = tables.training.most_tensor[task], min(MAX_STAGES, int(tables.layers[task]))
        sizes = tables.training.micro_batches.size
        choice[task, :SENDER] = tensor, stages, SHAPES - 1, sizes - 1, MODES - 1, 1, 1, tables.classes
        choice[task, SENDER] = tables.classes
        choice[task, MOVED:] = MOST_MOVED
        lowest[task, MOVED:] = -MOST_MOVED
    return low, high
