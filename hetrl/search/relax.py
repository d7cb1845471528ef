"""Full recomputation, of as few layers as memory asks for: the last step of a search.

Searches decide for whole stages; what their devices have left over spares layers the second forward pass.
"""

from __future__ import annotations

from dataclasses import replace

from hetrl.cost.iteration import with_prediction
from hetrl.cost.memory import device_footprints, training_footprint
from hetrl.cost.model import CostModel
from hetrl.cost.stages import stage_shape
from hetrl.plan.plan import Plan, Replica, TaskPlan
from hetrl.workload import TRAININGS


def relax_recomputation(plan: Plan, model: CostModel) -> Plan:
    """Return the plan with the fewest recomputed layers on each stage that fit, and its prediction."""
    tasks = {
        name: _relaxed(name, plan, model) if name in TRAININGS and task.recompute == "full" else task
        for name, task in plan.tasks.items()
    }
    return plan if tasks == plan.tasks else with_prediction(replace(plan, tasks=tasks), model)


def _relaxed(name: str, plan: Plan, model: CostModel) -> TaskPlan:
    task = plan.tasks[name]
    room = {
        device: model.rates(device).usable_gb - sum(need.resident_gb for need in needs.values())
        for device, needs in device_footprints(plan, model).items()
        if name in needs
    }
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, recompute_layers=_fewest(name, task, replica, index, room, model))
                for index, stage in enumerate(replica.stages)
            ),
        )
        for replica in task.replicas
    )
    if all(stage.recompute_layers == 0 for replica in replicas for stage in replica.stages):
        replicas, task = task.replicas, replace(task, recompute="none")
    return replace(task, replicas=replicas)


def _fewest(
    name: str, task: TaskPlan, replica: Replica, index: int, room: dict[str, float], model: CostModel
) -> int | None:
    """Return how few layers of a stage have to be recomputed; None: all of them."""
    stage = replica.stages[index]
    layers = stage.layers[1] - stage.layers[0]
    left = min(room[device] for device in stage.devices)
    rates = model.rates(stage.devices[0])
    whole = stage_shape(name, replica, index, rates, model.workload)
    for count in range(layers):
        shape = replace(whole, recompute_layers=count)
        if training_footprint(shape, task, index, model.workload).active_gb <= left:
            return count
    return None
