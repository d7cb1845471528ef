"""Seconds of one iteration of a plan: the tasks' own times, put together by groups and mode."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetrl.cost.efficiency import rates
from hetrl.cost.generation import generation_cost
from hetrl.cost.memory import peak_memory_gb, task_footprints
from hetrl.cost.network import Direction
from hetrl.cost.training import Cost, inference_cost, training_cost
from hetrl.cost.weight_sync import weight_sync_cost
from hetrl.hardware import Topology
from hetrl.plan import Plan, Predicted, TaskPlan
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, INFERENCES, TRAININGS, Workload

WEIGHT_SYNC = "weight_sync"
_NOBODY: Mapping[Direction, int] = {}


@dataclass(frozen=True)
class GroupTimes:
    """The seconds of one group in an iteration."""

    generation: float
    inferences: float
    trainings: float
    switches: float

    @property
    def total(self) -> float:
        """Return the time in which the group is busy."""
        return self.generation + self.inferences + self.trainings + self.switches


def iteration_seconds(groups: list[GroupTimes], transfer: float, pause: float, workload: Workload) -> float:
    """Return the time between two weight versions.

    sync:  T_gen + max_g sum inferences + max_g sum trainings + weight sync + max_g switches
    async: max(max_g (sum of its tasks + switches), transfer, (T_gen + T_inf + T_train + T_sync) / (1 + max_staleness)),
           with the pause of a version inside T_gen: links carry every version, one after the other. `max_staleness` 0
           equals sync.
    Source: HetRL (arXiv 2512.12476) section 3, with the staleness bound of AReaL (arXiv 2505.24298).
    """
    generation = max(group.generation for group in groups)
    chain = generation + max(group.inferences for group in groups) + max(group.trainings for group in groups)
    if workload.mode == "sync" or workload.max_staleness == 0:
        return chain + transfer + pause + max(group.switches for group in groups)
    busiest = max(group.total + (pause if group.generation > 0 else 0.0) for group in groups)
    return max(busiest, transfer, (chain + transfer + pause) / (1 + workload.max_staleness))


def task_cost(
    name: str, task: TaskPlan, topology: Topology, workload: Workload, sharing: Mapping[Direction, int] = _NOBODY
) -> Cost:
    """Return the seconds and the bytes between sites of one task in an iteration, undisturbed but for `sharing`."""
    if name == ACTOR_GENERATION:
        return generation_cost(task, topology, workload)
    if name in TRAININGS:
        return training_cost(name, task, topology, workload, sharing)
    return inference_cost(name, task, topology, workload)


def switch_seconds(name: str, task: TaskPlan, topology: Topology, workload: Workload) -> float:
    """Return the time that an offloaded task spends on PCIe in an iteration: its state in and out again."""
    if task.idle_state != "offload":
        return 0.0
    times = [0.0]
    for device, needs in task_footprints(name, task, topology, workload):
        per_second = rates(topology.device_by_id[device].gpu).host_bytes_per_s
        times.append(2 * needs.host_gb * 1e9 / per_second)
    return max(times)


def link_sharing(plan: Plan, alone: Mapping[str, Cost]) -> dict[Direction, int]:
    """Count, per direction between sites, the groups whose trainings may use it at the same time."""
    users: defaultdict[Direction, set[int]] = defaultdict(set)
    for index, group in enumerate(plan.groups):
        for name in group.tasks:
            for direction in alone[name].wan_bytes:
                users[direction].add(index)
    return {direction: len(groups) for direction, groups in users.items() if len(groups) > 1}


def predict(plan: Plan, topology: Topology, workload: Workload) -> Predicted:
    """Return what the cost model says of a plan.

    `tasks` has the seconds of each task and of `weight_sync`; `peak_memory_gb` those of each used device;
    `wan_gb_per_iteration` has a key `from-to` for each direction in which anything crosses between two sites (samples,
    a few bytes per token, are left out). A plan over a missing link takes infinite time.
    """
    costs = {name: task_cost(name, task, topology, workload) for name, task in plan.tasks.items()}
    if sharing := link_sharing(plan, costs):
        for name in (task for task in plan.tasks if task in TRAININGS):
            costs[name] = task_cost(name, plan.tasks[name], topology, workload, sharing)
    trainer, generator = plan.tasks[ACTOR_TRAINING], plan.tasks[ACTOR_GENERATION]
    sync = weight_sync_cost(plan.weight_sync, trainer, generator, topology, workload)
    groups = [_group_times(group.tasks, plan, costs, topology, workload) for group in plan.groups]
    seconds = iteration_seconds(groups, sync.transfer_seconds, sync.pause_seconds, workload)
    wan = defaultdict(float, sync.wan_bytes)
    for cost in costs.values():
        for direction, load in cost.wan_bytes.items():
            wan[direction] += load
    return Predicted(
        iteration_seconds=seconds,
        samples_per_second=workload.samples / seconds,
        tasks={**{name: cost.seconds for name, cost in costs.items()}, WEIGHT_SYNC: sync.seconds},
        peak_memory_gb=peak_memory_gb(plan, topology, workload),
        wan_gb_per_iteration={f"{a}-{b}": moved / 1e9 for (a, b), moved in sorted(wan.items()) if moved > 0},
    )


def _group_times(
    names: tuple[str, ...], plan: Plan, costs: Mapping[str, Cost], topology: Topology, workload: Workload
) -> GroupTimes:
    def total(kind: tuple[str, ...]) -> float:
        return sum(costs[name].seconds for name in names if name in kind)

    switches = sum(switch_seconds(name, plan.tasks[name], topology, workload) for name in names)
    return GroupTimes(total((ACTOR_GENERATION,)), total(INFERENCES), total(TRAININGS), switches)


def with_prediction(plan: Plan, topology: Topology, workload: Workload) -> Plan:
    """Return the plan with `predicted` filled."""
    return replace(plan, predicted=predict(plan, topology, workload))
