"""The numbers of generation and inferences per device class: replicas to choose from, their memory and their seconds.

A class offers *options*, each a tensor-parallel degree and a pipeline length whose replica fits an empty device:

    every TP inside a node that fits without a pipeline
    where none does: 2, 4 or 8 stages inside a node
    where none does either, of an inference: 2, 4 or 8 nodes, each one stage on the largest TP
    of slices of GPUs: one of them

How long a replica takes is not linear in its samples (waves of sequences, partly filled micro-batches). So it is kept
in rows over the units of work, which are filled the first time that they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.cost.generation import batch_limit, replica_seconds, server_of
from hetrl.cost.memory import footprint, least_kv_cache_gb, server_limits
from hetrl.cost.stages import Placed, model_of, place
from hetrl.cost.training import forward_pipeline_seconds
from hetrl.plan.plan import IDLE_STATES, Replica, Stage, TaskPlan
from hetrl.search.core.records import Flags1, Floats1, Floats2, Floats3, Floats5, Ints1, Ints2, Ints3, Ints4
from hetrl.search.space import Space, powers_of_two
from hetrl.workload import ACTOR_GENERATION, TRAININGS, Architecture, Workload

PIPELINES = (2, 4, 8)
MAX_SEQUENCES = 256  # vLLM's default max_num_seqs (documentation, engine arguments)
LEAST_SEQUENCES = 2  # a rollout replica that holds fewer at once is not worth its weights
FORWARD_TOKENS = 4096  # tokens per micro-batch of a forward pass: enough to fill a GPU
MOST_UNITS = 512  # of a row: the cost model is asked for each
FINE_UNITS = 64  # of generation, where a part of a prompt may be one
CACHE_STEP, CACHE_LEVELS = 0.82, 24  # KV caps from all that is of use down to a hundredth of it

# Columns of `ServingTables.seconds`: the fields of `ReplicaSeconds`, in order.
WHOLE, BUSY, ALONE, SHARED, QUEUED, REFILL, RENEWAL = range(7)
ROLLOUTS = 7  # how many they are

Floats = npt.NDArray[np.float64]


class ServingTables(NamedTuple):
    """What each option of each serving task is and costs; axes as in `hetrl.search.core.tables`."""

    options: Ints2  # [t, c] how many options there are
    tensor: Ints3  # [t, c, o]
    pipeline: Ints3  # [t, c, o]
    nodes: Ints3  # [t, c, o] nodes per replica
    resident_gb: Floats5  # [t, c, o, h, i] of the fullest device
    peak_gb: Floats5  # [t, c, o, h, i] of the fullest device while the task runs; infinite: too little for a KV cache
    host_gb: Floats5  # [t, c, o, h, i] per device
    switch_seconds: Floats5  # [t, c, o, h, i]
    row: Ints4  # [t, c, o, h] index into `seconds`
    units: Ints1  # [t] units of work of an iteration
    unit_samples: Ints1  # [t]
    cache_gb: Floats1  # [h]
    ready: Flags1  # [row] whether it is filled
    seconds: Floats3  # [row, units + 1, ROLLOUTS] of a replica with so many units, columns above
    ends: Floats2  # [row, units + 1] by what of these work is shared out; never falling


class Rows:
    """Fills rows of `ServingTables.seconds` by asking the cost model."""

    def __init__(self, workload: Workload) -> None:
        """Start without rows."""
        self._workload = workload
        self._known: dict[object, int] = {}
        self._asked: list[tuple[str, tuple[Placed, ...], int]] = []

    def index(self, name: str, placed: tuple[Placed, ...], limit: int) -> int:
        """Return the row of replicas like this; equal ones share it. `limit` bounds the sequences of generation."""
        key = (name == ACTOR_GENERATION, server_of(placed), limit)
        if key not in self._known:
            self._known[key] = len(self._asked)
            self._asked.append((name, placed, limit))
        return self._known[key]

    def __len__(self) -> int:
        return len(self._asked)

    def fill(self, tables: ServingTables, row: int) -> None:
        """Fill one row."""
        name, placed, limit = self._asked[row]
        task = self._workload.tasks.index(name)
        unit = int(tables.unit_samples[task])
        for units in range(1, int(tables.units[task]) + 1):
            tables.seconds[row, units] = self._seconds(name, placed, limit, units * unit)
        paced = tables.seconds[row, :, BUSY if self._workload.staleness else WHOLE]
        tables.ends[row] = np.maximum.accumulate(paced)
        tables.ready[row] = True

    def _seconds(self, name: str, placed: tuple[Placed, ...], limit: int, samples: int) -> tuple[float, ...]:
        workload = self._workload
        if name != ACTOR_GENERATION:
            return (forward_pipeline_seconds(placed, samples, forward_micro_batch(workload), workload),) * ROLLOUTS
        shape = (workload.prompt_tokens, workload.samples_per_prompt, workload.response)
        load = (samples, limit, *shape, workload.staleness, workload.samples)
        return replica_seconds(server_of(placed), *load, workload.renews_contexts)


def forward_micro_batch(workload: Workload) -> int:
    """Return the samples per micro-batch of every inference."""
    return powers_of_two(max(min(int(FORWARD_TOKENS / workload.max_sequence_tokens), 64), 1))[-1]


def max_sequences(workload: Workload) -> int:
    """Return the sequences that a rollout replica may run at once."""
    return max(min(workload.samples, MAX_SEQUENCES), 1)


def serving_task(name: str, idle: int, workload: Workload) -> TaskPlan:
    """Return a serving task without replicas."""
    if name == ACTOR_GENERATION:
        return TaskPlan("vllm", (), IDLE_STATES[idle])
    return TaskPlan("megatron", (), IDLE_STATES[idle], micro_batch=forward_micro_batch(workload))


def equal_stages(units: Sequence[tuple[str, ...]], layers: int) -> tuple[Stage, ...]:
    """Return a replica's stages on these units, layers split evenly."""
    bounds = [layers * index // len(units) for index in range(len(units) + 1)]
    return tuple(Stage(unit, (bounds[i], bounds[i + 1])) for i, unit in enumerate(units))


def serving_tables(space: Space) -> tuple[ServingTables, Rows]:
    """Return the numbers of all serving tasks of the workload on all classes, and the filler of their rows."""
    workload = space.problem.workload
    names, kinds = workload.tasks, range(len(space.classes))
    found = {
        (t, kind): _options(space, name, kind)
        for t, name in enumerate(names)
        for kind in kinds
        if name not in TRAININGS and space.usable(name, kind)
    }
    rollouts = [option for (t, _), options in found.items() if names[t] == ACTOR_GENERATION for option in options]
    tables = _empty(workload, len(kinds), 1 + max(map(len, found.values())), _cache_levels(workload, rollouts))
    rows = Rows(workload)
    for (t, kind), options in found.items():
        tables.options[t, kind] = len(options)
        for o, placed in enumerate(options, start=1):
            _enter(tables, rows, (t, kind, o), placed, workload)
    shape = (len(rows), int(tables.units.max()) + 1)
    ready, seconds, ends = np.zeros(len(rows), np.bool_), np.zeros((*shape, ROLLOUTS)), np.zeros(shape)
    return tables._replace(ready=ready, seconds=seconds, ends=ends), rows


def _empty(workload: Workload, kinds: int, options: int, caches: Sequence[float]) -> ServingTables:
    """Return tables without options and rows."""
    sizes = (len(workload.tasks), kinds, options)
    units = np.array([_units(name, workload) for name in workload.tasks], np.int64)
    tensor, pipeline, nodes = np.zeros((3, *sizes), np.int64)
    resident, peak, host, switch = np.zeros((4, *sizes, len(caches), len(IDLE_STATES)))
    return ServingTables(
        options=np.zeros(sizes[:2], np.int64),
        tensor=tensor,
        pipeline=pipeline,
        nodes=nodes,
        resident_gb=resident,
        peak_gb=peak,
        host_gb=host,
        switch_seconds=switch,
        row=np.zeros((*sizes, len(caches)), np.int64),
        units=units[:, 0].copy(),
        unit_samples=units[:, 1].copy(),
        cache_gb=np.array(caches),
        ready=np.zeros(0, np.bool_),
        seconds=np.zeros((0, 0, 0)),
        ends=np.zeros((0, 0)),
    )


def _enter(
    tables: ServingTables, rows: Rows, at: tuple[int, int, int], placed: tuple[Placed, ...], workload: Workload
) -> None:
    """Enter one option: what a replica of it is, and for each KV cap what it needs and the row of its seconds."""
    name = workload.tasks[at[0]]
    generates = name == ACTOR_GENERATION
    tables.tensor[at], tables.pipeline[at] = len(placed[0].devices), len(placed)
    tables.nodes[at] = len({device.node for stage in placed for device in stage.devices})
    for h in range(tables.cache_gb.size if generates else 1):
        replica = _served(name, placed, float(tables.cache_gb[h]), workload)
        limit = batch_limit(server_of(placed), replica, workload) if generates else 0
        tables.row[(*at, h)] = rows.index(name, placed, limit)
        needs = _memory(name, placed, replica, workload)
        memory = (tables.resident_gb, tables.peak_gb, tables.host_gb, tables.switch_seconds)
        for array, values in zip(memory, needs, strict=True):
            array[(*at, h)] = values


def _units(name: str, workload: Workload) -> tuple[int, int]:
    """Return the units of work of an iteration and the samples of one, a single one where they are few.

    Parts of generation are expectations (`hetrl.plan.plan.Replica`), a prompt is fine enough where there are many.
    """
    least = 1
    if name == ACTOR_GENERATION:
        parts = [n for n in range(1, workload.samples_per_prompt + 1) if workload.samples_per_prompt % n == 0]
        least = next((n for n in parts if workload.samples // n <= FINE_UNITS), parts[-1])
    total = workload.samples // least
    joined = [n for n in range(1, 17) if total % n == 0]
    chosen = next((n for n in joined if total // n <= MOST_UNITS), joined[-1])
    return total // chosen, least * chosen


def _options(space: Space, name: str, kind: int) -> list[tuple[Placed, ...]]:
    """Return a replica of each option on the first devices of the class."""
    workload, nodes = space.problem.workload, space.nodes[kind]
    model = model_of(name, workload)
    size = space.joined(kind)
    degrees = [tensor for tensor in powers_of_two(size) if _divides(name, tensor, model)]
    lone = [(tensor, 1) for tensor in degrees]
    inside = [(tensor, stages) for stages in PIPELINES for tensor in degrees if tensor * stages <= size]
    across = [(degrees[-1], stages) for stages in PIPELINES if stages <= len(nodes) and not space.sliced(kind)]
    for tries in (lone, inside) if name == ACTOR_GENERATION else (lone, inside, across):
        placed = [
            _placed(space, name, kind, tensor, stages, tries is across)
            for tensor, stages in tries
            if stages <= model.layers
        ]
        if fitting := [replica for replica in placed if _fits(name, replica, workload)]:
            return fitting
    return []


def _divides(name: str, tensor: int, model: Architecture) -> bool:
    copied = name == ACTOR_GENERATION and tensor % model.kv_heads == 0  # vLLM copies key-value heads, Megatron does not
    return model.heads % tensor == 0 and (model.kv_heads % tensor == 0 or copied)


def _placed(space: Space, name: str, kind: int, tensor: int, stages: int, across: bool) -> tuple[Placed, ...]:
    nodes, model = space.nodes[kind], space.problem.model
    if across:
        ranks = [node[:tensor] for node in nodes[:stages]]
    else:
        ranks = [nodes[0][start * tensor : (start + 1) * tensor] for start in range(stages)]
    units = [tuple(device.id for device in unit) for unit in ranks]
    replica = Replica(1, equal_stages(units, model_of(name, model.workload).layers))
    return place(name, replica, model)


def _served(name: str, placed: Sequence[Placed], cap_gb: float, workload: Workload) -> Replica:
    """Return a replica without stages that has what its server gets under a cap on the KV cache."""
    if name != ACTOR_GENERATION:
        return Replica(1, ())
    limits = server_limits([stage.shape for stage in placed], cap_gb, max_sequences(workload), workload)
    return Replica(1, (), *limits)


def _least_gb(placed: Sequence[Placed], workload: Workload) -> float:
    """Return the KV cache of a few sequences of full length, on the device where it is largest."""
    few = min(LEAST_SEQUENCES, workload.samples) * _sequence_gb(placed, workload)
    return max(few, least_kv_cache_gb((stage.shape for stage in placed), workload))


def _sequence_gb(placed: Sequence[Placed], workload: Workload) -> float:
    """Return the KV cache of one full sequence on the device where it is largest."""
    return max(stage.shape.kv_bytes_per_token for stage in placed) * workload.max_sequence_tokens / 1e9


def _fits(name: str, placed: Sequence[Placed], workload: Workload) -> bool:
    replica = _served(name, placed, _least_gb(placed, workload), workload)
    return bool(np.isfinite(_memory(name, placed, replica, workload)[1]).all())


def _cache_levels(workload: Workload, options: Sequence[tuple[Placed, ...]]) -> list[float]:
    """Return the KV caps to choose from, the largest one first: all that any replica can use, then ever less."""
    largest = max(
        (
            min(
                max(max_sequences(workload) * _sequence_gb(placed, workload), _least_gb(placed, workload)),
                placed[0].shape.rates.usable_gb,
            )
            for placed in options
        ),
        default=0.0,
    )
    # a plan's figure is short, and holds as many sequences as it was meant for
    return [math.ceil(largest * CACHE_STEP**level * 1e4) / 1e4 for level in range(CACHE_LEVELS)]


def _memory(name: str, placed: Sequence[Placed], replica: Replica, workload: Workload) -> Floats:
    """Return resident GB, peak GB, host GB and switch seconds, for each idle state; of the fullest device."""
    found = np.zeros((4, len(IDLE_STATES)))
    gpu = placed[0].shape.rates
    for i in range(len(IDLE_STATES)):
        task = serving_task(name, i, workload)
        needs = [footprint(name, task, replica, stage.shape, index, workload) for index, stage in enumerate(placed)]
        peak = max(need.total_gb for need in needs)
        fits = peak <= gpu.usable_gb and (name != ACTOR_GENERATION or _holds_sequences(placed, replica, workload))
        host = max(need.host_gb for need in needs)
        resident = max(need.resident_gb for need in needs)
        found[:, i] = resident, peak if fits else np.inf, host, 2 * host * 1e9 / gpu.host_bytes_per_s
    return found


def _holds_sequences(placed: Sequence[Placed], replica: Replica, workload: Workload) -> bool:
    """Return whether the KV cache holds a few sequences of full length; a hair less is rounding."""
    return replica.kv_cache_gb >= _least_gb(placed, workload) * (1 - 1e-9)
