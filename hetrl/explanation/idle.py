"""Why GPUs are idle: what the iteration would take if generation or an inference used them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hetrl.cost.check import violations
from hetrl.cost.iteration import task_cost
from hetrl.cost.memory import with_server
from hetrl.cost.objective import plan_value
from hetrl.explanation.resources import Part, attribution
from hetrl.explanation.training_sites import shares
from hetrl.hardware import Device
from hetrl.plan.plan import Plan, Replica, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.search.assemble import Made, plan_of
from hetrl.search.space import powers_of_two
from hetrl.workload import ACTOR_GENERATION, ENGINE_OF_TASK, INFERENCES, ITERATION


@dataclass(frozen=True)
class Idle:
    """Devices of one class without a task, and the best that a task could make of them.

    `task` is None where none of generation and the inferences can run there; `why_not` says why. `seconds` is the
    iteration with these devices, `costs` what each resource then adds or saves, largest change first; `better` says
    whether the plan's objective gains by it.
    """

    gpu: str
    devices: tuple[str, ...]
    task: str | None = None
    seconds: float | None = None
    costs: tuple[Part, ...] = ()
    why_not: str = ""
    better: bool = False


def idle(plan: Plan, problem: Problem, waits: Sequence[Part]) -> tuple[Idle, ...]:
    """Return the idle devices by kind of node; `waits` are the resources' parts of the plan's iteration."""
    used, found = set(plan.devices), []
    for kind, devices in problem.topology.devices_by_kind.items():
        free = [device for device in devices if device.id not in used]
        if free:
            found.append(_idle(kind.gpu, free, plan, problem, waits))
    return tuple(found)


def _idle(gpu: str, free: list[Device], plan: Plan, problem: Problem, waits: Sequence[Part]) -> Idle:
    names = tuple(device.id for device in free)
    best: tuple[float, str, Plan] | None = None
    broken = ""
    for task in (name for name in (ACTOR_GENERATION, *INFERENCES) if name in plan.tasks):
        for other in _extended(plan, task, free, problem):
            if found := violations(other, problem.model):
                broken = broken or found[0]
            elif best is None or other.predicted.iteration_seconds < best[0]:
                best = (other.predicted.iteration_seconds, task, other)
    if best is None:
        return Idle(gpu, names, why_not=broken or _no_way(free[0], plan, problem))
    seconds, task, other = best
    ours, theirs = (plan_value(one, problem.topology, problem.objective) for one in (plan, other))
    return Idle(gpu, names, task, seconds, _changes(waits, other, problem), better=theirs < ours)


def _no_way(device: Device, plan: Plan, problem: Problem) -> str:
    site = problem.topology.site_by_name[device.site]
    if not problem.topology.linked(plan.lead_site, device.site):
        return f"no link between {plan.lead_site} and {device.site}"
    return f"{device.site} has only {', '.join(site.engines)}" if len(site.engines) < 2 else "no task fits there"


def _extended(plan: Plan, name: str, free: list[Device], problem: Problem) -> Iterator[Plan]:
    """Yield the plan with more replicas of one task on the free devices, for each tensor-parallel degree."""
    topology, workload = problem.topology, problem.workload
    site = topology.site_by_name[free[0].site]
    if ENGINE_OF_TASK[name] not in site.engines or not topology.linked(plan.lead_site, site.name):
        return
    by_node: dict[str, list[str]] = {}
    for device in free:
        by_node.setdefault(device.node, []).append(device.id)
    task = plan.tasks[name]
    layers = (0, task.replicas[0].stages[-1].layers[1])
    unit = workload.samples_per_prompt if name == ACTOR_GENERATION else 1
    for tensor in powers_of_two(max(map(len, by_node.values()))):
        more = [
            Replica(unit, (Stage(tuple(devices[at : at + tensor]), layers),))
            for devices in by_node.values()
            for at in range(0, len(devices) - tensor + 1, tensor)
        ]
        if name == ACTOR_GENERATION:
            more = [_with_server(replica, task, problem) for replica in more]
        if len(task.replicas) + len(more) <= workload.samples // unit:
            yield _with_task(plan, name, _balanced(name, task, (*task.replicas, *more), unit, problem), problem)


def _with_server(replica: Replica, task: TaskPlan, problem: Problem) -> Replica:
    """Return the replica with as much of what the largest of the task's servers gets as it has room for."""
    cap_gb = max(other.kv_cache_gb for other in task.replicas)
    return with_server(replica, cap_gb, max(other.max_sequences for other in task.replicas), problem.model)


def _balanced(name: str, task: TaskPlan, replicas: tuple[Replica, ...], unit: int, problem: Problem) -> TaskPlan:
    """Return the task with these replicas and samples in proportion to the speed of each alone."""
    fair = max(problem.workload.samples // len(replicas) // unit, 1) * unit
    speeds: dict[object, float] = {}
    found = []
    for replica in replicas:
        gpus = tuple(problem.topology.device_by_id[device].gpu for device in replica.devices)
        key = (gpus, tuple(len(stage.devices) for stage in replica.stages), replica.kv_cache_gb, replica.max_sequences)
        if key not in speeds:
            alone = replace(task, replicas=(replace(replica, samples=fair),))
            speeds[key] = 1 / task_cost(name, alone, problem.model).seconds
        found.append(speeds[key])
    counts = shares(found, problem.workload.samples // unit)
    return replace(
        task, replicas=tuple(replace(r, samples=count * unit) for r, count in zip(replicas, counts, strict=True))
    )


def _with_task(plan: Plan, name: str, task: TaskPlan, problem: Problem) -> Plan:
    tasks = {**plan.tasks, name: task}
    groups = [{member: tasks[member] for member in group.tasks} for group in plan.groups]
    made = Made(plan.solver.name, plan.solver.seed, plan.inputs)
    return plan_of(problem, groups, made)


def _changes(waits: Sequence[Part], other: Plan, problem: Problem) -> tuple[Part, ...]:
    """Return what the iteration of another plan waits for more (or less) than that of this one."""
    found = attribution(other, problem.model).get(ITERATION, ())
    before, after = ({part.name: part.seconds for part in parts} for parts in (waits, found))
    parts = [Part(name, after.get(name, 0.0) - before.get(name, 0.0)) for name in dict.fromkeys((*after, *before))]
    least = 1e-3 * other.predicted.iteration_seconds
    return tuple(sorted((p for p in parts if abs(p.seconds) > least), key=lambda part: -abs(part.seconds)))
