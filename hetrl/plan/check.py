"""Every constraint on a plan that needs no cost model; with that of memory they are `hetrl.cost.check`.

The rules are those of HetRL (arXiv 2512.12476, section 3: partitioning and assignment) and of the engines: Megatron's
rank grid (one tensor-parallel degree, one layer split) and vLLM servers that live inside one site.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from hetrl.errors import UsageError
from hetrl.hardware import Topology
from hetrl.plan.check_sites import repeated, site_violations
from hetrl.plan.plan import (
    IDLE_STATES,
    RECOMPUTES,
    SHARDINGS,
    Group,
    Plan,
    Replica,
    Stage,
    TaskPlan,
    nodes_of,
    sites_of,
)
from hetrl.workload import ACTOR_GENERATION, ENGINE_OF_TASK, TRAININGS, Architecture, Workload

_CHOICES = {
    "idle_state": IDLE_STATES,
    "recompute": RECOMPUTES,
    "gradient_dtype": ("fp32", "bf16"),
    "optimizer_sharding": SHARDINGS,
}


class PlanError(UsageError):
    """A plan breaks constraints: `violations` has one line for each."""

    def __init__(self, violations: tuple[str, ...]) -> None:
        """Make the message: one line per violation."""
        self.violations = violations
        count = "a constraint" if len(violations) == 1 else f"{len(violations)} constraints"
        lines = "\n".join(f"  {line}" for line in violations)
        super().__init__(f"the plan breaks {count}; correct it, or plan again with `hetrl plan`:\n{lines}")


def violations(plan: Plan, topology: Topology, workload: Workload, *, relaxed: bool = False) -> list[str]:
    """Return one line per broken constraint: where, what, with ids; an empty list for a legal plan.

    `relaxed` lifts the training grid (one tensor-parallel degree and one layer split for all replicas) for study.
    A plan whose shape is broken (wrong tasks, empty parts, unknown devices) is reported for its shape alone.
    """
    if broken := [*_shape(plan, topology, workload)]:
        return broken
    found = [*_algorithm(plan, workload), *_groups(plan)]
    for name, task in plan.tasks.items():
        model = workload.architecture_of(name)
        assert model is not None  # _shape: the workload has the task
        alone = any(group.tasks == (name,) for group in plan.groups)
        found += [*_settings(name, task, alone), *_gradients(name, task, workload), *_servers(name, task)]
        found += [*_samples(name, task, workload), *_layers(name, task, model), *_recomputation(name, task)]
        found += [*_placement(name, task, topology), *_slices(name, task, topology)]
        found += _tensor_parallel(name, task, model)
        found += _training_grid(name, task) if name in TRAININGS and not relaxed else []
        found += _replica_grids(name, task) if name not in TRAININGS else []
    return [*found, *site_violations(plan, topology)]


def _replicas(name: str, task: TaskPlan) -> Iterator[tuple[str, Replica]]:
    for index, replica in enumerate(task.replicas):
        yield f"{name}, replica {index}", replica


def _stages(name: str, task: TaskPlan) -> Iterator[tuple[str, Stage]]:
    for where, replica in _replicas(name, task):
        for index, stage in enumerate(replica.stages):
            yield f"{where}, stage {index}", stage


def _shape(plan: Plan, topology: Topology, workload: Workload) -> Iterator[str]:
    """The workload's tasks, no empty part, no device that the topology does not have."""
    for name in workload.tasks:
        if name not in plan.tasks:
            yield f"{name}: the workload has this task, the plan does not"
    for name, task in plan.tasks.items():
        if name not in workload.tasks:
            yield f"{name}: the plan has this task, the workload does not"
        if not task.replicas:
            yield f"{name}: has no replica"
        yield from (f"{where}: has no stage" for where, replica in _replicas(name, task) if not replica.stages)
        yield from (f"{where}: has no device" for where, stage in _stages(name, task) if not stage.devices)
        yield from _unknown_devices(name, task.devices, topology)
    for index, group in enumerate(plan.groups):
        yield from _unknown_devices(f"group {index}", group.devices, topology)


def _unknown_devices(where: str, devices: tuple[str, ...], topology: Topology) -> Iterator[str]:
    for device in dict.fromkeys(devices):
        if device not in topology.device_by_id:
            yield f"{where}: the topology has no device {device}"


def _algorithm(plan: Plan, workload: Workload) -> Iterator[str]:
    expected = {
        "kind": workload.algorithm,
        "mode": workload.mode,
        "max_staleness": workload.max_staleness,
        "optimizer_steps_per_iteration": workload.optimizer_steps_per_iteration,
    }
    for key, value in expected.items():
        if (found := getattr(plan.algorithm, key)) != value:
            yield f"algorithm.{key}: the plan says {found}, the workload {value}"


def _groups(plan: Plan) -> Iterator[str]:
    """Each task in one group, disjoint device sets, tasks inside their group's devices, arrays of loose replicas."""
    owners = Counter(task for group in plan.groups for task in group.tasks)
    for name in plan.tasks:
        if owners[name] != 1:
            yield f"{name}: is in {owners[name]} groups; it must be in exactly one"
    for name in sorted(owners.keys() - plan.tasks.keys()):
        yield f"groups: name the task {name}, which the plan does not have"
    owner: dict[str, int] = {}
    for index, group in enumerate(plan.groups):
        for device in repeated(group.devices):
            yield f"group {index}: has the device {device} twice"
        for device in dict.fromkeys(group.devices):
            if owner.setdefault(device, index) != index:
                yield f"group {index}: the device {device} belongs to group {owner[device]}; groups are disjoint"
        yield from _group_tasks(index, group, plan)


def _group_tasks(index: int, group: Group, plan: Plan) -> Iterator[str]:
    if group.job not in ("gang", "array"):
        yield f'group {index}: job is "gang" or "array", not "{group.job}"'
    for name in group.tasks:
        task = plan.tasks.get(name)
        if task is None:
            continue
        for device in dict.fromkeys(task.devices):
            if device not in group.devices:
                yield f"{name}: uses the device {device}, which is not among the devices of its group {index}"
    if group.job == "array" and group.tasks != (ACTOR_GENERATION,):
        yield f"group {index}: job array is for {ACTOR_GENERATION} alone; {', '.join(group.tasks)} needs a gang"


def _settings(name: str, task: TaskPlan, alone: bool) -> Iterator[str]:
    """Known values; and none that nothing would come of."""
    if task.engine != ENGINE_OF_TASK[name]:
        yield f"{name}: runs on {ENGINE_OF_TASK[name]}, not on {task.engine}"
    for key, known in _CHOICES.items():
        if (value := getattr(task, key)) not in known:
            yield f'{name}: {key} is one of {", ".join(known)}, not "{value}"'
    if task.idle_state == "sleep" and name != ACTOR_GENERATION:
        yield f"{name}: idle_state sleep frees a KV cache, which only {ACTOR_GENERATION} has; use resident or offload"
    if task.idle_state != "resident" and alone:
        yield f"{name}: idle_state is {task.idle_state}, and no other task has a turn on its devices; take resident"
    unused = () if name in TRAININGS else ("recompute", "gradient_dtype", "optimizer_sharding")
    for key in (*unused, *(("micro_batch",) if name == ACTOR_GENERATION else ())):
        if (value := getattr(task, key)) != getattr(TaskPlan, key):
            yield f"{name}: {key} is {value}, of which it makes no use; take {getattr(TaskPlan, key)}"
    if task.micro_batch < 1:
        yield f"{name}: micro_batch is {task.micro_batch}; it is at least 1"


def _gradients(name: str, task: TaskPlan, workload: Workload) -> Iterator[str]:
    """Gradients are kept and reduced in bf16 only where the weights are."""
    if name in TRAININGS and task.gradient_dtype == "bf16" and workload.weight_bytes != 2:
        yield f"{name}: gradient_dtype is bf16, the model's dtype is not; take fp32"


def _servers(name: str, task: TaskPlan) -> Iterator[str]:
    """Every server of generation gets a KV cache and a number of sequences; nothing else has a server."""
    for where, replica in _replicas(name, task):
        for key in ("kv_cache_gb", "max_sequences"):
            number = getattr(replica, key)
            if name == ACTOR_GENERATION and not number > 0:  # what is not a number is refused, too
                yield f"{where}: {key} is {number}; its server needs more than 0"
            elif name != ACTOR_GENERATION and number != 0:
                yield f"{where}: {key} is {number}; only {ACTOR_GENERATION} has servers"


def _samples(name: str, task: TaskPlan, workload: Workload) -> Iterator[str]:
    """Shares are positive, sum to the batch and come, where they are trained on, in whole micro-batches."""
    total = sum(replica.samples for replica in task.replicas)
    if total != workload.samples:
        yield f"{name}: the samples of its replicas sum to {total}; an iteration has {workload.samples}"
    unit, of = 1, ""
    if name in TRAININGS:
        unit, of = max(task.micro_batch, 1), "micro_batch"
    for where, replica in _replicas(name, task):
        if replica.samples < 1:
            yield f"{where}: handles {replica.samples} samples; a replica handles at least one"
        elif replica.samples % unit:
            yield f"{where}: handles {replica.samples} samples, which is not a multiple of {of} ({unit})"


def _layers(name: str, task: TaskPlan, model: Architecture) -> Iterator[str]:
    for where, replica in _replicas(name, task):
        spans = [stage.layers for stage in replica.stages]
        for index, (first, last) in enumerate(spans):
            if first >= last:
                yield f"{where}, stage {index}: holds no layer ([{first}, {last}])"
        for index, (span, following) in enumerate(pairwise(spans)):
            if span[1] != following[0]:
                yield f"{where}: stage {index} ends before layer {span[1]}, stage {index + 1} starts at {following[0]}"
        if (spans[0][0], spans[-1][1]) != (0, model.layers):
            yield f"{where}: holds the layers [{spans[0][0]}, {spans[-1][1]}] of {model.name}'s [0, {model.layers}]"


def _recomputation(name: str, task: TaskPlan) -> Iterator[str]:
    """A number of layers is said only where whole layers are computed again, and the stage has as many."""
    for where, stage in _stages(name, task):
        count, layers = stage.recompute_layers, stage.layers[1] - stage.layers[0]
        if count is None:
            continue
        said = f"{where}: recompute_layers is {count}"
        if task.recompute != "full":
            yield f"{said}, and recompute is {task.recompute}, not full"
        elif not 0 <= count <= layers:
            yield f"{said}; the stage has {layers} layers"


def _placement(name: str, task: TaskPlan, topology: Topology) -> Iterator[str]:
    for device in repeated(task.devices):
        yield f"{name}: has the device {device} twice"
    for site in sites_of(task.devices):
        if task.engine not in (engines := topology.site_by_name[site].engines):
            yield f"{name}: needs the engine {task.engine}; the site {site} has {', '.join(engines) or 'none'}"
    for where, replica in _replicas(name, task) if name not in TRAININGS else ():
        if len(sites := sites_of(replica.devices)) > 1:
            yield f"{where}: spans the sites {', '.join(sites)}; only training may"
        elif name == ACTOR_GENERATION and len(nodes := nodes_of(replica.devices)) > 1:
            yield f"{where}: spans the nodes {', '.join(nodes)}; a vLLM server that starts lies in one"


def _slices(name: str, task: TaskPlan, topology: Topology) -> Iterator[str]:
    """A slice of a GPU works alone: no world of a training and no replica has it and another device."""
    joined = [(name, task.devices)]
    if name not in TRAININGS:
        joined = [(where, replica.devices) for where, replica in _replicas(name, task)]
    for where, devices in joined:
        slices = [device for device in devices if topology.slice_of(topology.device_by_id[device])]
        if slices and len(devices) > 1:
            gpu = topology.slice_of(topology.device_by_id[slices[0]])
            yield (
                f"{where}: has {len(devices)} devices, and {slices[0]} is a slice of a GPU ({gpu}), which works alone; "
                "take whole GPUs, or one slice and nothing else"
            )


def _tensor_parallel(name: str, task: TaskPlan, model: Architecture) -> Iterator[str]:
    for where, stage in _stages(name, task):
        degree = len(stage.devices)
        if len(nodes := nodes_of(stage.devices)) > 1:
            yield f"{where}: tensor parallelism spans the nodes {', '.join(nodes)}; it stays inside one"
        if model.heads % degree:
            yield f"{where}: {degree} devices do not divide the {model.heads} attention heads of {model.name}"
        elif model.kv_heads % degree and (task.engine == "megatron" or degree % model.kv_heads):
            # Both split key-value heads; vLLM also copies each to as many devices.
            yield f"{where}: {degree} devices do not divide the {model.kv_heads} key-value heads of {model.name}"


def _training_grid(name: str, task: TaskPlan) -> Iterator[str]:
    """Megatron's grid: one tensor-parallel degree for all stages, one layer split for all replicas."""
    degrees = sorted({len(stage.devices) for _, stage in _stages(name, task)})
    if len(degrees) > 1:
        yield f"{name}: its stages have {', '.join(map(str, degrees))} devices; training has one tensor parallelism"
    expected = [stage.layers for stage in task.replicas[0].stages]
    for where, replica in _replicas(name, task):
        if (layers := [stage.layers for stage in replica.stages]) != expected:
            shown, first = (", ".join(f"[{a}, {b}]" for a, b in spans) for spans in (layers, expected))
            yield f"{where}: splits the layers {shown}, replica 0 {first}; training has one split"


def _replica_grids(name: str, task: TaskPlan) -> Iterator[str]:
    """Replicas may differ from each other; inside one, both engines have one tensor-parallel degree."""
    for where, replica in _replicas(name, task):
        if len(degrees := sorted({len(stage.devices) for stage in replica.stages})) > 1:
            yield f"{where}: its stages have {', '.join(map(str, degrees))} devices; it has one tensor parallelism"
