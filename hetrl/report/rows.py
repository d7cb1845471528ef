"""A plan as rows: one per task, site and parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from hetrl.plan.plan import Plan, Replica, TaskPlan, site_of
from hetrl.workload import TASKS, TRAININGS


@dataclass(frozen=True)
class TaskRow:
    """Devices of one task at one site; what belongs to the whole task or set of replicas stands in its first row."""

    task: str
    site: str
    devices: tuple[str, ...]
    parallelism: str = ""  # TPxPPxDP
    samples: int | None = None
    seconds: float | None = None


def task_rows(plan: Plan) -> list[TaskRow]:
    """Return the rows of all tasks in dataflow order.

    Replicas of equal parallelism at the same sites share a row; training is one set of replicas wherever it runs.
    """
    known = [name for name in TASKS if name in plan.tasks]
    return [row for name in (*known, *(plan.tasks.keys() - known)) for row in _rows_of(name, plan)]


def _rows_of(name: str, plan: Plan) -> list[TaskRow]:
    rows: list[TaskRow] = []
    for replicas in _alike(name, plan.tasks[name]):
        by_site: dict[str, list[str]] = {}
        for device in (device for replica in replicas for device in replica.devices):
            by_site.setdefault(site_of(device), []).append(device)
        for site, devices in by_site.items():
            first = site == next(iter(by_site))
            rows.append(
                TaskRow(
                    task=name,
                    site=site,
                    devices=tuple(devices),
                    parallelism=_parallelism(replicas) if first else "",
                    samples=sum(replica.samples for replica in replicas) if first else None,
                    seconds=None if rows else plan.predicted.tasks.get(name),
                )
            )
    return rows


def _alike(name: str, task: TaskPlan) -> list[list[Replica]]:
    if name in TRAININGS:
        return [list(task.replicas)]
    sets: dict[tuple[str, tuple[int, ...]], list[Replica]] = {}
    for replica in task.replicas:
        shape = tuple(len(stage.devices) for stage in replica.stages)
        sets.setdefault((site_of(replica.devices[0]), shape), []).append(replica)
    return list(sets.values())


def _parallelism(replicas: list[Replica]) -> str:
    """Return TPxPPxDP; degrees that differ (a relaxed plan) are joined by slashes."""
    tensor = dict.fromkeys(len(stage.devices) for replica in replicas for stage in replica.stages)
    pipeline = dict.fromkeys(len(replica.stages) for replica in replicas)
    return f"{'/'.join(map(str, tensor))}×{'/'.join(map(str, pipeline))}×{len(replicas)}"
