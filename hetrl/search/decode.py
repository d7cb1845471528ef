"""From a vector to the tasks on real devices: what the compiled evaluation summed up by classes, written out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from hetrl.cost.memory import with_server
from hetrl.plan.plan import IDLE_STATES, RECOMPUTES, SHARDINGS, Replica, Stage, TaskPlan
from hetrl.search.core.encoding import CACHE, IDLE, MICRO_BATCH, PIPELINE, RECOMPUTE, SHARDING, TENSOR, Vector, views
from hetrl.search.core.functions import value_task
from hetrl.search.core.tables import Tables
from hetrl.search.core.tables_serving import equal_stages, max_sequences, serving_task
from hetrl.search.core.workspace import Bench
from hetrl.search.space import Chunk, Space
from hetrl.workload import ACTOR_GENERATION

Unit = tuple[str, ...]  # device ids of the ranks of one stage


def decode(x: Vector, space: Space, bench: Bench) -> list[dict[str, TaskPlan]]:
    """Return the groups' tasks; every row of seconds that the vector needs must be filled.

    Raises ValueError for a vector that is not legal or whose devices do not carry its tasks.
    """
    tables = bench.tables
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    packed = space.pack([tuple(int(n) for n in row) for row in devices[: group.max() + 1]])
    if packed is None:
        raise ValueError("a group's devices are torn over two nodes; call repair first")
    groups: list[dict[str, TaskPlan]] = [{} for _ in packed]
    for task, name in enumerate(space.problem.workload.tasks):
        count = value_task(task, x, *bench.pointers)
        chunks = packed[group[task]]
        if tables.is_training[task]:
            plan = _training(count, choice[task], chunks, space, bench)
        else:
            plan = _serving(task, classes[task], choice[task], chunks, space, bench)
        if not np.isfinite(bench.parts.seconds[task]):
            raise ValueError(f"{name}: its devices do not carry it")
        groups[group[task]][name] = plan
    return groups


def _units(chunks: Sequence[Chunk], kind: int, size: int) -> list[Unit]:
    """Return a class's devices in units of so many ranks, node by node."""
    return [
        tuple(device.id for device in chunk.devices[start : start + size])
        for chunk in chunks
        if chunk.kind == kind
        for start in range(0, len(chunk.devices) - size + 1, size)
    ]


def _training(count: int, choice: Vector, chunks: Sequence[Chunk], space: Space, bench: Bench) -> TaskPlan:
    workload, cohorts = space.problem.workload, bench.room.cohorts
    stages, ranks = int(choice[PIPELINE]), 1 << int(choice[TENSOR])
    ends = np.cumsum(cohorts.layers[:stages]).tolist()
    units = {int(kind): _units(chunks, kind, ranks) for kind in np.unique(cohorts.kind[:count, :stages])}
    left = workload.samples - int((cohorts.samples * cohorts.replicas)[:count].sum())
    unit = left // max(int(cohorts.extra[:count].sum()), 1)
    replicas = []
    for q in range(count):
        for r in range(cohorts.replicas[q]):
            placed = tuple(
                Stage(
                    units[cohorts.kind[q, i]][cohorts.offset[q, i] + r * cohorts.stride[q, i]],
                    (ends[i] - int(cohorts.layers[i]), ends[i]),
                )
                for i in range(stages)
            )
            replicas.append(Replica(int(cohorts.samples[q]) + (unit if r < cohorts.extra[q] else 0), placed))
    return TaskPlan(
        "megatron",
        tuple(replicas),
        IDLE_STATES[choice[IDLE]],
        micro_batch=int(bench.tables.training.micro_batches[choice[MICRO_BATCH]]),
        recompute=RECOMPUTES[choice[RECOMPUTE]],
        gradient_dtype=workload.gradient_dtype,
        optimizer_sharding=SHARDINGS[choice[SHARDING]],
    )


def _serving(
    task: int, options: Vector, choice: Vector, chunks: Sequence[Chunk], space: Space, bench: Bench
) -> TaskPlan:
    serving, shares, workload = bench.tables.serving, bench.room.shares, space.problem.workload
    replicas: list[Replica] = []
    for kind in range(bench.tables.classes):
        placed = _serving_replicas(task, kind, options[kind], chunks, bench.tables)
        for index, stages in enumerate(islice(placed, bench.parts.runs[task, kind])):
            units = int(shares.units[kind]) + int(index < shares.extra[kind])
            replicas.append(Replica(units * int(serving.unit_samples[task]), stages))
    name = workload.tasks[task]
    if name == ACTOR_GENERATION:
        cap_gb, sequences = float(serving.cache_gb[choice[CACHE]]), max_sequences(workload)
        replicas = [with_server(replica, cap_gb, sequences, space.problem.model) for replica in replicas]
    return replace(serving_task(name, int(choice[IDLE]), workload), replicas=tuple(replicas))


def _serving_replicas(
    task: int, kind: int, option: int, chunks: Sequence[Chunk], tables: Tables
) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages of the replicas that fit: inside nodes, or over whole nodes."""
    serving, layers = tables.serving, int(tables.layers[task])
    tensor, stages = int(serving.tensor[task, kind, option]), int(serving.pipeline[task, kind, option])
    if serving.nodes[task, kind, option] > 1:
        nodes = [chunk for chunk in chunks if chunk.kind == kind and len(chunk.devices) == tables.per_node[kind]]
        for first in range(0, len(nodes) - stages + 1, stages):
            ranks = [tuple(device.id for device in node.devices[:tensor]) for node in nodes[first : first + stages]]
            yield equal_stages(ranks, layers)
        return
    for devices in _units(chunks, kind, tensor * stages) if option else ():
        yield equal_stages([devices[start : start + tensor] for start in range(0, len(devices), tensor)], layers)
