"""verl as its documentation sets it up: all tasks colocated on all GPUs, one uniform layout, blind to differences.

    for TP, PP by the number of GPUs of a replica, larger TP first (the smallest legal layout that fits)
        training: DP over all GPUs in the order they are listed, equal layers, equal samples, full recompute
        inferences and generation: the same TP, equal samples
        idle states: resident where that fits, else everything offloaded between the tasks
        the first that fits is the plan

Source: verl (HybridFlow, arXiv 2409.19256), colocated placement; its Megatron workers order ranks TP, DP, PP, and its
examples switch on gradient checkpointing and the offload of parameters and optimiser where memory is short. A site
without one of the engines or without a link to the others is left out; where no site has all engines, each task uses
the sites that have its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hetrl.cost.compute import StageShape
from hetrl.cost.efficiency import rates
from hetrl.cost.memory import serving_footprint, task_footprints
from hetrl.cost.stages import model_of, stage_shape
from hetrl.errors import InfeasibleError
from hetrl.plan import Replica, Stage, TaskPlan, node_of
from hetrl.search.space import Space, clique, powers_of_two
from hetrl.workload import ACTOR_GENERATION, ENGINE_OF_TASK, TRAININGS, Workload

PIPELINES = (1, 2, 4, 8)
MAX_SEQUENCES = 256


def colocated(space: Space) -> tuple[dict[str, TaskPlan], int]:
    """Return verl's plan of all tasks and the number of layouts compared; raises InfeasibleError where none fits."""
    compared = 0
    for tensor, pipeline in _sizes(space):
        for idle in ("resident", "offload"):
            compared += 1
            tasks = _tasks(space, tensor, pipeline, idle)
            if tasks is not None:
                return tasks, compared
    raise InfeasibleError(
        "verl: no uniform layout of all tasks fits on the GPUs together; the smallest GPU decides for all. "
        "Use planner.solver sha-ea, or leave the sites with the smallest GPUs out"
    )


def _sizes(space: Space) -> Iterator[tuple[int, int]]:
    limit = max(kind.gpus_per_node for kind in space.classes)
    sizes = [(tensor, pipeline) for tensor in powers_of_two(limit) for pipeline in PIPELINES]
    yield from sorted(sizes, key=lambda size: (size[0] * size[1], -size[0]))


def _units(space: Space, task: str, tensor: int) -> list[tuple[str, ...]]:
    """Return the TP units of a task over all nodes of the sites that count, in the listed order."""
    tasks = space.problem.workload.tasks
    space = replace(space, sites=clique(space.problem.topology))
    kinds = [k for k in range(len(space.classes)) if all(space.usable(name, k) for name in tasks)]
    kinds = kinds or [k for k in range(len(space.classes)) if space.usable(task, k)]
    nodes = [node for kind in kinds for node in space.nodes[kind]]
    return [
        tuple(device.id for device in node[start : start + tensor])
        for node in nodes
        for start in range(0, len(node) - tensor + 1, tensor)
    ]


def _tasks(space: Space, tensor: int, pipeline: int, idle: str) -> dict[str, TaskPlan] | None:
    workload = space.problem.workload
    plans: dict[str, TaskPlan] = {}
    for name in workload.tasks:
        model = model_of(name, workload)
        if model.heads % tensor or pipeline > model.layers or (name in TRAININGS and model.kv_heads % tensor):
            return None
        stages = pipeline if name in TRAININGS else 1
        unit = workload.samples_per_prompt if name == ACTOR_GENERATION else 1
        replicas = _replicas(_units(space, name, tensor), stages, model.layers, workload.samples, unit)
        if not replicas:
            return None
        plans[name] = _task(name, replicas, idle)
    return _fitting(space, plans)


def _task(name: str, replicas: tuple[Replica, ...], idle: str) -> TaskPlan:
    if name == ACTOR_GENERATION:
        return TaskPlan("vllm", replicas, "sleep" if idle == "resident" else idle, max_sequences=MAX_SEQUENCES)
    sharding = "data_parallel" if name in TRAININGS and len(replicas) > 1 else "none"
    recompute = "full" if name in TRAININGS else "none"
    return TaskPlan(ENGINE_OF_TASK[name], replicas, idle, 1, recompute, "fp32", sharding)


def _replicas(
    units: Sequence[tuple[str, ...]], stages: int, layers: int, samples: int, unit: int
) -> tuple[Replica, ...]:
    """Return equal replicas in Megatron's order (stage i of replica r is unit i x DP + r); too many are left out."""
    count = min(len(units) // stages, samples // unit)
    bounds = [layers * index // stages for index in range(stages + 1)]
    shares = [(samples // unit * (r + 1) // count - samples // unit * r // count) * unit for r in range(count)]
    return tuple(
        Replica(shares[r], tuple(Stage(units[i * count + r], (bounds[i], bounds[i + 1])) for i in range(stages)))
        for r in range(count)
    )


def _fitting(space: Space, plans: Mapping[str, TaskPlan]) -> dict[str, TaskPlan] | None:
    """Return the plans with the KV cache that the fullest device leaves; None where they do not fit together."""
    topology, workload = space.problem.topology, space.problem.workload
    held: dict[str, tuple[float, float]] = {}
    host: dict[str, float] = {}
    for name, task in plans.items():
        for device, needs in task_footprints(name, task, topology, workload):
            resident, active = held.get(device, (0.0, 0.0))
            active = max(active, needs.active_gb) if name != ACTOR_GENERATION else active
            held[device] = (resident + needs.resident_gb, active)
            node = node_of(device)
            host[node] = host.get(node, 0.0) + needs.host_gb
    usable = {device: rates(topology.device_by_id[device].gpu).usable_gb for device in held}
    if any(sum(held[device]) > usable[device] for device in held):
        return None
    if any(gb > topology.node_by_id[node].host_memory_gb for node, gb in host.items()):
        return None
    generation = plans[ACTOR_GENERATION]
    cache = min(_cache_gb(space, generation, held, usable), _needed_gb(generation, workload))
    if cache <= 0:
        return None
    return {**plans, ACTOR_GENERATION: replace(generation, kv_cache_gb=int(cache * 1e6) / 1e6)}


def _shape(task: TaskPlan, workload: Workload, gpu: str) -> StageShape:
    return stage_shape(ACTOR_GENERATION, task.replicas[0], 0, gpu, workload)


def _cache_gb(
    space: Space, task: TaskPlan, held: Mapping[str, tuple[float, float]], usable: Mapping[str, float]
) -> float:
    """Return the KV cache that every device has room for: one figure, as gpu_memory_utilization is."""
    topology, workload = space.problem.topology, space.problem.workload
    shapes = {gpu: _shape(task, workload, gpu) for gpu in {topology.device_by_id[d].gpu for d in task.devices}}
    own = {gpu: serving_footprint(shape, task, workload).active_gb for gpu, shape in shapes.items()}
    return min(usable[d] - held[d][0] - own[topology.device_by_id[d].gpu] for d in task.devices)


def _needed_gb(task: TaskPlan, workload: Workload) -> float:
    shape = _shape(task, workload, "cpu")
    sequences = min(task.max_sequences, workload.samples)
    return sequences * workload.max_sequence_tokens * shape.kv_bytes_per_token / 1e9
