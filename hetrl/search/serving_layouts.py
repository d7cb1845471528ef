"""Layouts of generation and of the inferences on given chunks: replicas per class, samples by rate.

Replicas of different classes may differ in TP. A replica is one unit of TP ranks inside a node; only where no TP of a
class's nodes fits, units of one class (hence one site) form a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetrl.cost.compute import StageShape
from hetrl.cost.efficiency import rates
from hetrl.cost.generation import Server, batch_limit, replica_seconds, server_of
from hetrl.cost.memory import inference_footprint, serving_footprint
from hetrl.cost.stages import Placed, model_of, place, stage_shape
from hetrl.cost.training import forward_pipeline_seconds
from hetrl.hardware import Device, Topology
from hetrl.plan import Replica, Stage, TaskPlan
from hetrl.search.balance import balance
from hetrl.search.space import Chunk, Space, powers_of_two
from hetrl.workload import ACTOR_GENERATION, Architecture, Workload

PIPELINES = (1, 2, 4, 8)
MAX_SEQUENCES = 256  # vLLM's default max_num_seqs (documentation, engine arguments)
FORWARD_TOKENS = 4096  # tokens per micro-batch of a forward pass: enough to fill a GPU
LEAST_SEQUENCES = 2  # a rollout replica that holds fewer at once is not worth its weights
_Table = tuple[float, ...]


@dataclass(frozen=True)
class Pool:
    """Equal replicas of one class: the stages of each, without samples."""

    kind: int
    replicas: tuple[tuple[Stage, ...], ...]


def inference_layouts(space: Space, name: str, chunks: Sequence[Chunk]) -> Iterator[tuple[TaskPlan, float]]:
    """Yield layouts of a forward-only task and their seconds: the least TP that fits each class, and twice that."""
    workload, topology = space.problem.workload, space.problem.topology
    task = TaskPlan("megatron", (), micro_batch=_forward_micro_batch(workload))
    for factor in (1, 2):

        def fits(shape: StageShape, task: TaskPlan = task) -> bool:
            return inference_footprint(shape, task, workload).total_gb <= rates(shape.gpu).usable_gb

        pools = _pools(space, name, chunks, fits, factor)

        def times(placed: Sequence[Placed], task: TaskPlan = task) -> _Table:
            return _forward_table(tuple(placed), task.micro_batch, workload)

        if found := _with_samples(name, task, pools, times, 1, topology, workload):
            yield found


def _forward_micro_batch(workload: Workload) -> int:
    return powers_of_two(max(min(int(FORWARD_TOKENS / workload.max_sequence_tokens), 64), 1))[-1]


@lru_cache(maxsize=4096)
def _forward_table(placed: tuple[Placed, ...], micro_batch: int, workload: Workload) -> _Table:
    return tuple(forward_pipeline_seconds(placed, n, micro_batch, workload) for n in range(1, workload.samples + 1))


def generation_layouts(
    space: Space, chunks: Sequence[Chunk], room_gb: Mapping[str, float], idle_state: str
) -> Iterator[tuple[TaskPlan, float]]:
    """Yield layouts of generation and their seconds, in the room that the other tasks leave.

    `room_gb` is per device what those that stay resident leave of the usable memory; a device without an entry is free.
    The KV cache takes the room, but no more than `max_sequences` full sequences need.
    """
    workload, topology = space.problem.workload, space.problem.topology
    limit = max(min(workload.samples, MAX_SEQUENCES), 1)
    base = TaskPlan("vllm", (), idle_state, max_sequences=limit)

    def room(chunk_devices: Sequence[Device]) -> float:
        return min(room_gb.get(d.id, rates(d.gpu).usable_gb) for d in chunk_devices)

    rooms: dict[int, float] = {}
    for chunk in chunks:
        rooms[chunk.kind] = min(rooms.get(chunk.kind, float("inf")), room(chunk.devices))
    for least in powers_of_two(max((len(chunk.devices) for chunk in chunks), default=1)):

        def fits(shape: StageShape, kind: int = -1) -> bool:
            return _cache_gb(shape, base, workload, rooms[kind])[1]

        pools = _pools(space, ACTOR_GENERATION, chunks, fits, 1, least, by_kind=True)
        if not pools:
            continue
        task = replace(base, kv_cache_gb=_cap_gb(pools, base, rooms, room_gb, topology, workload))

        def times(placed: Sequence[Placed], task: TaskPlan = task) -> _Table:
            server = server_of(placed)
            return _generation_table(server, batch_limit(server, task, workload), workload)

        if found := _with_samples(
            ACTOR_GENERATION, task, pools, times, workload.samples_per_prompt, topology, workload
        ):
            yield found


def _cache_gb(shape: StageShape, base: TaskPlan, workload: Workload, room: float) -> tuple[float, bool]:
    """Return the KV cache that fits beside weights and workspace, and whether it holds a few sequences."""
    empty = serving_footprint(shape, replace(base, kv_cache_gb=0.0), workload).total_gb
    sequence_gb = shape.kv_bytes_per_token * workload.max_sequence_tokens / 1e9
    cache = min(room - empty, base.max_sequences * sequence_gb)
    return cache, cache >= min(LEAST_SEQUENCES, workload.samples) * sequence_gb


def _cap_gb(
    pools: Sequence[Pool],
    base: TaskPlan,
    rooms: Mapping[int, float],
    room_gb: Mapping[str, float],
    topology: Topology,
    workload: Workload,
) -> float:
    """Return the plan's one KV figure: the most that any class can use, within what shared devices leave."""
    largest, shared = 0.0, float("inf")
    for pool in pools:
        replica = Replica(1, pool.replicas[0])
        for index, stage in enumerate(replica.stages):
            gpu = topology.device_by_id[stage.devices[0]].gpu
            shape = stage_shape(ACTOR_GENERATION, replica, index, gpu, workload)
            cache = _cache_gb(shape, base, workload, rooms[pool.kind])[0]
            largest = max(largest, cache)
            if room_gb and any(
                device in room_gb for stages in pool.replicas for part in stages for device in part.devices
            ):
                shared = min(shared, cache)
    return int(min(largest, shared) * 1e4) / 1e4  # rounded down: it must fit


@lru_cache(maxsize=4096)
def _generation_table(server: Server, limit: float, workload: Workload) -> _Table:
    group = workload.samples_per_prompt
    shape = (workload.prompt_tokens, group, workload.response, workload.staleness, workload.samples)
    units = range(1, workload.samples // group + 1)
    return tuple(replica_seconds(server, n * group, limit, *shape).busy for n in units)


def _pools(
    space: Space,
    name: str,
    chunks: Sequence[Chunk],
    fits: Callable[..., bool],
    factor: int,
    least: int = 1,
    by_kind: bool = False,
) -> list[Pool]:
    """Return the replicas of each class: the smallest TP >= `least` (times `factor`) that fits, else a pipeline."""
    workload = space.problem.workload
    model = model_of(name, workload)
    found = []
    for kind in dict.fromkeys(chunk.kind for chunk in chunks if space.usable(name, chunk.kind)):
        own = [chunk for chunk in chunks if chunk.kind == kind]
        gpu = space.classes[kind].gpu
        degrees = [t for t in powers_of_two(max(len(c.devices) for c in own)) if _divides(t, model)]
        wanted = [t for t in degrees if t >= least] or degrees[-1:]
        for pipeline, tensor in [(p, t) for p in PIPELINES for t in (wanted if p == 1 else degrees[-1:])]:
            replica = Replica(1, _stages((("",) * tensor,) * pipeline, model.layers))
            shapes = [stage_shape(name, replica, i, gpu, workload) for i in range(len(replica.stages))]
            if pipeline <= model.layers and all(fits(s, kind=kind) if by_kind else fits(s) for s in shapes):
                if tensor * factor in degrees and pipeline == 1:
                    tensor *= factor
                pool = _pool(kind, own, tensor, pipeline, model.layers)
                found += [pool] if pool.replicas else []
                break
    return found


def _divides(tensor: int, model: Architecture) -> bool:
    return model.heads % tensor == 0 and (model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0)


def _stages(units: Sequence[tuple[str, ...]], layers: int) -> tuple[Stage, ...]:
    count = len(units)
    bounds = [layers * index // count for index in range(count + 1)]
    return tuple(Stage(unit, (bounds[i], bounds[i + 1])) for i, unit in enumerate(units))


def _pool(kind: int, chunks: Sequence[Chunk], tensor: int, pipeline: int, layers: int) -> Pool:
    units = [
        tuple(device.id for device in chunk.devices[start : start + tensor])
        for chunk in chunks
        for start in range(0, len(chunk.devices) - tensor + 1, tensor)
    ]
    whole = len(units) // pipeline
    return Pool(kind, tuple(_stages(units[r * pipeline : (r + 1) * pipeline], layers) for r in range(whole)))


def _with_samples(
    name: str,
    task: TaskPlan,
    pools: Sequence[Pool],
    times: Callable[[Sequence[Placed]], _Table],
    unit: int,
    topology: Topology,
    workload: Workload,
) -> tuple[TaskPlan, float] | None:
    """Return the task and its seconds, the samples divided by rate; replicas that would get none are left out."""
    if not pools:
        return None
    tables = [times(place(name, Replica(1, pool.replicas[0]), topology, workload)) for pool in pools]
    shares = balance(tables, [len(pool.replicas) for pool in pools], workload.samples // unit)
    replicas = tuple(
        Replica(count * unit, stages)
        for pool, share in zip(pools, shares, strict=True)
        for count, stages in zip(share, pool.replicas, strict=True)
        if count
    )
    busiest = zip(tables, shares, strict=True)
    seconds = max(table[max(share) - 1] for table, share in busiest if max(share))
    return replace(task, replicas=replicas), seconds
