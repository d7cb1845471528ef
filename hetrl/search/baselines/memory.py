"""What fits together on the same devices, and the KV cache that is left for generation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hetrl.cost.memory import serving_footprint, task_footprints
from hetrl.cost.stages import stage_shape
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
    generation shares none, a small GPU takes less by itself. It must hold at least one whole sequence.
    """
    held = _held({name: task for name, task in tasks.items() if name != ACTOR_GENERATION}, problem)
    if held is None:
        return None
    workload = problem.workload
    generation = replace(tasks[ACTOR_GENERATION], kv_cache_gb=0.0)
    shared: list[float] = []
    free: list[float] = []
    most = 0.0
    for replica in generation.replicas:
        shape = stage_shape(ACTOR_GENERATION, replica, 0, problem.model.rates(replica.devices[0]), workload)
        empty, usable = serving_footprint(shape, generation, workload), shape.rates.usable_gb
        sequence_gb = workload.max_sequence_tokens * shape.kv_bytes_per_token / 1e9
        most = max(most, min(generation.max_sequences, workload.samples) * sequence_gb)
        for device in replica.devices:
            resident, active = held.get(device, (0.0, 0.0))
            room = usable - resident - empty.total_gb
            if room < sequence_gb or resident + empty.resident_gb + active > usable:
                return None
            (shared if device in held else free).append(room)
    cache = min([most, *shared]) if shared else min(most, max(free))
    cache = int(cache * 1e6) / 1e6  # rounded down: it has to fit
    whole = {**tasks, ACTOR_GENERATION: replace(generation, kv_cache_gb=cache)}
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
