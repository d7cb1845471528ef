"""What fits together on the same devices, and the KV cache that is left for generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hetrl.cost.memory import least_kv_cache_gb, rollout_shapes, serving_footprint, task_footprints, with_server
from hetrl.plan.plan import TaskPlan, node_of
from hetrl.problem import Problem
from hetrl.workload import ACTOR_GENERATION

Held = Mapping[str, tuple[float, float]]  # per device: GB resident, largest active GB


def fits_alone(name: str, task: TaskPlan, problem: Problem) -> bool:
    """Return whether the task fits on its devices while nothing else is there."""
    needs = task_footprints(name, task, problem.model)
    return all(need.total_gb <= problem.model.rates(device).usable_gb for device, need in needs)


def with_kv_cache(tasks: Mapping[str, TaskPlan], problem: Problem) -> dict[str, TaskPlan] | None:
    """Return the tasks with the KV cache that the others leave; None where they do not fit together.

    The cache is one figure, as gpu_memory_utilization is: what the fullest shared device has room for. Where
    generation shares none, a small GPU gets less. It must hold at least one whole sequence.
    """
    held = _held({name: task for name, task in tasks.items() if name != ACTOR_GENERATION}, problem)
    if held is None:
        return None
    workload = problem.workload
    generation = tasks[ACTOR_GENERATION]
    shared: list[float] = []
    free: list[float] = []
    most = 0.0
    for replica in generation.replicas:
        shape = rollout_shapes(replica, problem.model)[0]
        empty = serving_footprint(shape, replace(replica, kv_cache_gb=0.0), generation.idle_state, workload)
        usable, sequence_gb = shape.rates.usable_gb, workload.max_sequence_tokens * shape.kv_bytes_per_token / 1e9
        least = max(sequence_gb, least_kv_cache_gb([shape], workload))
        most = max(most, min(replica.max_sequences, workload.samples) * sequence_gb, least)
        for device in replica.devices:
            resident, active = held.get(device, (0.0, 0.0))
            room = usable - resident - empty.total_gb
            if room < least or resident + empty.resident_gb + active > usable:
                return None
            (shared if device in held else free).append(room)
    cache = min([most, *shared]) if shared else min(most, max(free))
    cache = int(cache * 1e6) / 1e6  # rounded down: it has to fit
    replicas = tuple(with_server(one, cache, one.max_sequences, problem.model) for one in generation.replicas)
    whole = {**tasks, ACTOR_GENERATION: replace(generation, replicas=replicas)}
    return whole if _host_suffices(whole, problem) else None


def _held(tasks: Mapping[str, TaskPlan], problem: Problem) -> Held | None:
    """Return what the tasks hold of each device; None where they overflow one."""
    held: dict[str, tuple[float, float]] = {}
    for name, task in tasks.items():
        for device, needs in task_footprints(name, task, problem.model):
            resident, active = held.get(device, (0.0, 0.0))
            held[device] = (resident + needs.resident_gb, max(active, needs.active_gb))
    usable = {device: problem.model.rates(device).usable_gb for device in held}
    return None if any(sum(held[device]) > usable[device] for device in held) else held


def _host_suffices(tasks: Mapping[str, TaskPlan], problem: Problem) -> bool:
    """Return whether the nodes' memory takes what is offloaded."""
    host: defaultdict[str, float] = defaultdict(float)
    for name, task in tasks.items():
        for device, needs in task_footprints(name, task, problem.model):
            host[node_of(device)] += needs.host_gb
    return all(gb <= problem.topology.node_by_id[node].host_memory_gb for node, gb in host.items())
