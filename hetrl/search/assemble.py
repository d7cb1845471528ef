"""From planned groups to a whole `Plan`: real devices, groups split where they can be, routes, prediction, check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hetrl.cost.iteration import with_prediction
from hetrl.cost.weight_sync import weight_routes
from hetrl.plan.plan import Algorithm, Group, Plan, Predicted, Solver, TaskPlan, site_of
from hetrl.problem import Problem
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, TASKS


@dataclass(frozen=True)
class Made:
    """How a plan comes about: the solver, its seed, and the digests of what it read."""

    solver: str
    seed: int
    inputs: Mapping[str, str]


def finish(problem: Problem, groups: Sequence[Mapping[str, TaskPlan]], made: Made) -> Plan:
    """Return the plan of these groups with its prediction; groups whose tasks share no device are split.

    Tasks of one group never overlap, so a split can only help. `solver.seconds` and `.evaluations` are left at 0.
    """
    return plan_of(problem, [_awake(part) for group in groups for part in _components(group)], made)


def plan_of(problem: Problem, groups: Sequence[Mapping[str, TaskPlan]], made: Made) -> Plan:
    """Return the plan of these groups as they are, with its prediction."""
    tasks = {name: task for group in groups for name, task in group.items()}
    workload = problem.workload
    sites = dict.fromkeys(site_of(d) for name in (ACTOR_TRAINING, *tasks) for d in tasks[name].devices)
    plan = Plan(
        algorithm=Algorithm(
            workload.algorithm, workload.mode, workload.max_staleness, workload.optimizer_steps_per_iteration
        ),
        groups=tuple(_group(group) for group in groups),
        tasks={name: tasks[name] for name in TASKS if name in tasks},
        weight_sync=weight_routes(tasks),
        site_order=tuple(sites),
        predicted=Predicted(0.0, 0.0),  # filled in below: a prediction needs the plan
        solver=Solver(made.solver, made.seed, 0.0, 0),
        inputs=dict(made.inputs),
    )
    return with_prediction(plan, problem.model)


def _components(group: Mapping[str, TaskPlan]) -> list[dict[str, TaskPlan]]:
    """Split a group into the sets of tasks that are joined by common devices."""
    parts: list[dict[str, TaskPlan]] = []
    for name, task in group.items():
        devices = set(task.devices)
        joined = [part for part in parts if any(devices & set(other.devices) for other in part.values())]
        parts = [part for part in parts if part not in joined]
        parts.append({key: value for part in joined for key, value in part.items()} | {name: task})
    return parts


def _awake(part: dict[str, TaskPlan]) -> dict[str, TaskPlan]:
    """Keep a task resident that is alone on its devices: nobody needs the room."""
    if len(part) > 1:
        return part
    return {name: replace(task, idle_state="resident") for name, task in part.items()}


def _group(tasks: Mapping[str, TaskPlan]) -> Group:
    """Return the group on the devices in use: generation alone is an array, all else a gang."""
    devices = tuple(dict.fromkeys(device for task in tasks.values() for device in task.devices))
    names = tuple(name for name in TASKS if name in tasks)
    return Group(names, devices, "array" if names == (ACTOR_GENERATION,) else "gang")
