"""The plan space S of the integer program, and what each task costs in it on each allotment of devices.

    groups       any set partition of the tasks
    devices      any number of a class that is one node; of several nodes, whole ones and a part of one more: a power of
                 two that divides the node, so that groups never tear each other's parts over two nodes. Where that
                 makes more than `MOST_ALLOTMENTS` allotments: whole and half nodes, or whole nodes only
    classes      a task uses all or some of its group's classes; a chain of stages passes them in the topology's order
    trainings    any TP of a node, up to `NARROW_STAGES` stages, every shape, micro-batch, recomputation and sharding of
                 `hetrl.search.encoding`; layers split and samples shared as the evaluator does it
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
from typing import Any

import numpy as np
import numpy.typing as npt

from hetrl.search.encoding import (
    ALIKE as STAGES_ALIKE,
    CACHE,
    CHOICES,
    IDLE,
    MICRO_BATCH,
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
    views,
)
from hetrl.search.jit import njit
from hetrl.search.parts import Parts
from hetrl.search.serving_value import replicas_of
from hetrl.search.space import Space, powers_of_two
from hetrl.search.sync_value import sync_seconds
from hetrl.search.tables import Tables
from hetrl.search.tables_serving import LAST, PROMPT, REFILL, WHOLE
from hetrl.search.value import VALUED, Room, value_task

MOST_ALLOTMENTS = 20_000

# An option's numbers: seconds, then blocks of one number per class.
# CHAIN: of generation in mode async, from a batch's admission to its last sample; EARLY: see `ilp_options`.
GENERATION, INFERENCES, TRAININGS, CHAIN, TRANSFER, EARLY = range(6)
RESIDENT, ACTIVE, HOST, APART, TOGETHER, RUNS = range(6)
SECONDS, BLOCKS = 6, 6

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Genes = npt.NDArray[np.int32]


@njit
def at(block: int, kind: int, classes: int) -> int:
    """Return the place of a class in a block of an option's numbers."""
    return SECONDS + block * classes + kind


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
            for micro_batch, recompute, sharding, idle in product(micro_batches, (0, 1), (0, 1), (0, 1)):
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


@njit
def value_options(
    task: int, x: Any, genes: Genes, first: int, tables: Tables, room: Room, parts: Parts, out: Floats
) -> tuple[int, int]:
    """Fill the options' numbers from row `first` on; infinite seconds where the devices do not carry the task.

    Return (`VALUED`, rows), or the row of `ServingTables.seconds` that must be filled first and the place to go on.
    """
    _, _, classes, choice = views(x, tables.tasks, tables.classes)
    for n in range(first, genes.shape[0]):
        classes[task] = genes[n, : tables.classes]
        choice[task] = genes[n, tables.classes :]
        missing = value_task(task, x, tables, room, parts)
        if missing != VALUED and not tables.is_training[task]:
            return missing, n
        out[n] = 0.0
        phase = TRAININGS if tables.is_training[task] else INFERENCES if tables.is_inference[task] else GENERATION
        out[n, phase] = parts.seconds[task] + parts.switch_seconds[task]
        for kind in range(tables.classes):
            resident, host = parts.resident_gb[task, kind], parts.host_gb[task, kind]
            out[n, at(RESIDENT, kind, tables.classes)] = resident
            out[n, at(ACTIVE, kind, tables.classes)] = parts.peak_gb[task, kind] - resident
            out[n, at(HOST, kind, tables.classes)] = host
            full = parts.peak_gb[task, kind] > tables.usable_gb[kind]
            if full or host * tables.per_node[kind] > tables.node_gb[kind]:
                out[n, phase] = np.inf
        if np.isfinite(out[n, phase]) and task == tables.trainer:
            _note_transfers(x, tables, parts, out[n])
        if np.isfinite(out[n, phase]) and task == tables.generation:
            _note_generation(x, tables, parts, out[n])
    return VALUED, genes.shape[0]


@njit
def _note_generation(x: Any, tables: Tables, parts: Parts, out: Floats) -> None:
    """Add the pause of a version; in mode async note what `ilp_options` makes of the admission rule.

    WHOLE lies under INFERENCES, LAST under CHAIN, the pause under TRANSFER and PROMPT under EARLY until then.
    """
    group, devices, classes, _ = views(x, tables.tasks, tables.classes)
    _, pause = sync_seconds(group, devices, classes, tables, parts)
    for kind in range(tables.classes):
        out[at(RUNS, kind, tables.classes)] = 1.0 if parts.runs[tables.generation, kind] > 0 else 0.0
    out[GENERATION] += pause
    if tables.staleness > 0:
        out[GENERATION] += parts.rollouts[REFILL]
        out[INFERENCES], out[CHAIN] = parts.rollouts[WHOLE], parts.rollouts[LAST]
        out[TRANSFER], out[EARLY] = pause, parts.rollouts[PROMPT]


@njit
def _note_transfers(x: Any, tables: Tables, parts: Parts, out: Floats) -> None:
    """Set the seconds of a version's way to rollouts on each class alone: of another group, and of the same one.

    Rollouts of the same group are taken to use all its nodes of the class.
    """
    group, devices, classes, _ = views(x, tables.tasks, tables.classes)
    trainer, generation = tables.trainer, tables.generation
    owner, row = group[generation], devices[1].copy()
    option_row, runs = classes[generation].copy(), parts.runs[generation].copy()
    for kind in range(tables.classes):
        if tables.serving.options[generation, kind] == 0:
            continue
        classes[generation] = 0
        classes[generation, kind] = 1
        parts.runs[generation] = 0
        single = tables.devices[kind] == tables.per_node[kind]
        parts.runs[generation, kind] = 1
        devices[1] = 0
        devices[1, kind] = 1 if single else tables.per_node[kind]
        group[generation] = 1
        out[at(APART, kind, tables.classes)], _ = sync_seconds(group, devices, classes, tables, parts)
        if devices[group[trainer], kind] > 0:
            group[generation] = group[trainer]
            carried = replicas_of(generation, kind, 1, devices[group[trainer], kind], tables)
            parts.runs[generation, kind] = max(carried, 1)
            out[at(TOGETHER, kind, tables.classes)], _ = sync_seconds(group, devices, classes, tables, parts)
        else:
            out[at(TOGETHER, kind, tables.classes)] = out[at(APART, kind, tables.classes)]
    group[generation] = owner
    devices[1], classes[generation], parts.runs[generation] = row, option_row, runs


@njit
def dominated(row: Floats, kept: Floats, count: int, width: int) -> bool:
    """Return whether one of the kept rows is nowhere larger in the first `width` numbers."""
    for n in range(count):
        better = True
        for place in range(width):
            if kept[n, place] > row[place]:
                better = False
                break
        if better:
            return True
    return False


@njit
def pareto(rows: Floats, phase_limit: float) -> Ints:
    """Return the rows that no other one is nowhere worse than, without those beyond the limit of seconds."""
    total = rows[:, :SECONDS].sum(axis=1)
    order = np.argsort(total, kind="mergesort")
    kept = np.empty_like(rows)
    places = np.empty(rows.shape[0], np.int64)
    count = 0
    for n in order:
        if rows[n, :CHAIN].max() > phase_limit or not np.isfinite(total[n]):
            continue
        if not dominated(rows[n], kept, count, rows.shape[1]):
            kept[count] = rows[n]
            places[count] = n
            count += 1
    return places[:count]
