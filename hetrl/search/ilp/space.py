"""The plan space S of the integer program, and what each task costs in it on each allotment of devices.

    groups       any set partition of the tasks
    devices      any number of a class that is one node; of several nodes, whole ones and a part of one more: a power of
                 two that divides the node, so that groups never tear each other's parts over two nodes. Where that
                 makes more than `MOST_ALLOTMENTS` allotments: whole and half nodes, or whole nodes only
    classes      a task uses all or some of its group's classes; a chain of stages passes them in the topology's order
    trainings    any TP of a node, up to `NARROW_STAGES` stages, every shape, micro-batch, recomputation and sharding of
                 `hetrl.search.core.encoding`; layers split and samples shared as the evaluator does it
    serving      any option of each class, and every `NARROW_CACHE`-th KV cap
    idle states  all
    host memory  a device has its part of its node's

An *option* is one way to run one task on one allotment. Its numbers come from the compiled evaluator, so that the
integer program and every other solver value the same plan alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from hetrl.search.core.encoding import (
    ALIKE as STAGES_ALIKE,
    CACHE,
    CHOICES,
    IDLE,
    MICRO_BATCH,
    MODES,
    NARROW_CACHE,
    NARROW_STAGES,
    PIPELINE,
    RECOMPUTE,
    SHAPE,
    SHAPES,
    SHARDING,
    STAGES_BY_CLASS,
    TENSOR,
    USED,
)
from hetrl.search.core.functions import undominated
from hetrl.search.core.ilp_states import CHAIN, SECONDS
from hetrl.search.core.tables import Tables
from hetrl.search.space import Space, powers_of_two

MOST_ALLOTMENTS = 20_000  # every task's options are read on each of them

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Genes = npt.NDArray[np.int32]


def device_counts(space: Space) -> list[Ints]:
    """Return, for each class, how many of its devices a group may own, ascending."""
    for step in range(1, 4):
        counts = [_counts(len(nodes[0]), len(nodes), step) for nodes in space.nodes]
        if math.prod(map(len, counts)) <= MOST_ALLOTMENTS:
            break
    return counts


def _counts(node: int, nodes: int, step: int) -> Ints:
    """Return the numbers at a step of coarseness: 1 all of S, 2 whole and half nodes, 3 whole nodes."""
    if step == 1 and nodes == 1:
        return np.arange(node + 1)
    parts = [part for part in powers_of_two(node - 1) if node % part == 0] if node > 1 else []
    parts = [part for part in parts if step == 1 or (step == 2 and 2 * part == node)]
    total = node * nodes
    return np.array([n for w in range(nodes + 1) for n in [w * node, *(w * node + p for p in parts)] if n <= total])


def genes_of(task: int, used: tuple[int, ...], tables: Tables) -> Genes:
    """Return the genes (classes, then choice) of every option of a task that uses exactly these classes."""
    found = _training_genes if tables.is_training[task] else _serving_genes
    rows = [*found(task, used, tables)] if all(tables.usable[task, kind] for kind in used) else []
    return np.array(rows, np.int32).reshape(len(rows), tables.classes + CHOICES)


def _training_genes(task: int, used: tuple[int, ...], tables: Tables) -> Iterator[list[int]]:
    order = [*used, *(kind for kind in range(tables.classes) if kind not in used)]
    most = min(NARROW_STAGES, int(tables.layers[task]))
    largest = max(int(tables.per_node[kind]) for kind in used).bit_length() - 1
    degrees = range(min(int(tables.training.most_tensor[task]), largest) + 1)
    micro_batches = range(tables.training.micro_batches.size)
    for tensor, stages in product(degrees, range(1, most + 1)):
        for shape in _shapes(stages, len(used)):
            for micro_batch, recompute, sharding, idle in product(micro_batches, range(MODES), (0, 1), (0, 1)):
                choice = [0] * CHOICES
                choice[TENSOR], choice[PIPELINE], choice[SHAPE] = tensor, stages, shape
                choice[MICRO_BATCH], choice[RECOMPUTE], choice[SHARDING] = micro_batch, recompute, sharding
                choice[IDLE], choice[USED] = idle, len(used)
                yield order + choice


def _shapes(stages: int, classes: int) -> tuple[int, ...]:
    """Return the shapes that differ."""
    if stages == 1:
        return (STAGES_BY_CLASS,)
    return (STAGES_BY_CLASS, STAGES_BY_CLASS + STAGES_ALIKE) if classes == 1 else tuple(range(SHAPES))


def _serving_genes(task: int, used: tuple[int, ...], tables: Tables) -> Iterator[list[int]]:
    generates = task == tables.generation
    caches = range(0, tables.serving.cache_gb.size, NARROW_CACHE) if generates else range(1)
    ranges = [range(1, int(tables.serving.options[task, kind]) + 1) for kind in used]
    for options, cache, idle in product(product(*ranges), caches, range(3 if generates else 2)):
        classes = [0] * tables.classes
        for kind, option in zip(used, options, strict=True):
            classes[kind] = option
        choice = [0] * CHOICES
        choice[IDLE], choice[CACHE] = idle, cache
        yield classes + choice


def pareto(rows: Floats, limit: float) -> Ints:
    """Return the options that no other one is nowhere worse than, without those with a phase beyond so many seconds."""
    total = rows[:, :SECONDS].sum(axis=1)
    within = np.flatnonzero((rows[:, :CHAIN].max(axis=1) <= limit) & np.isfinite(total))
    return undominated_rows(rows, within[np.argsort(total[within], kind="stable")])


def undominated_rows(rows: Floats, order: Ints) -> Ints:
    """Return the indices of the rows, of those in `order`, that none before it is nowhere larger than."""
    places = np.empty(len(order), np.int64)
    return places[: undominated(rows, order, places)]
