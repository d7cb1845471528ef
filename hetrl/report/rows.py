"""A plan as rows: one per task, site and parallelism; and one per link between sites, with what crosses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetrl.hardware import Topology
from hetrl.plan.plan import Plan, Replica, TaskPlan, site_of
from hetrl.report.text import figure
from hetrl.workload import TASKS, TRAININGS


@dataclass(frozen=True)
class TaskRow:
    """Devices of one task at one site; what belongs to the whole task or set of replicas stands in its first row.

    `servers` says what each server of these replicas gets, where they have some.
    """

    task: str
    site: str
    devices: tuple[str, ...]
    parallelism: str = ""  # TPxPPxDP
    samples: int | None = None
    seconds: float | None = None
    servers: str = ""


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
                    servers=servers(replicas) if first else "",
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


def servers(replicas: Sequence[Replica]) -> str:
    """Return what the servers of these replicas get, from the least to the most; nothing where they have none."""
    if not any(replica.max_sequences for replica in replicas):
        return ""
    caches = dict.fromkeys(figure(gb) for gb in sorted(replica.kv_cache_gb for replica in replicas))
    sequences = dict.fromkeys(sorted(replica.max_sequences for replica in replicas))
    return f"KV cache {_range([*caches])} GB, {_range([*sequences])} sequences"


def _range(values: Sequence[object]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _parallelism(replicas: list[Replica]) -> str:
    """Return TPxPPxDP; degrees that differ (a relaxed plan) are joined by slashes."""
    tensor = dict.fromkeys(len(stage.devices) for replica in replicas for stage in replica.stages)
    pipeline = dict.fromkeys(len(replica.stages) for replica in replicas)
    return f"{'/'.join(map(str, tensor))}×{'/'.join(map(str, pipeline))}×{len(replicas)}"


@dataclass(frozen=True)
class LinkRow:
    """One link; `gb` crosses it in an iteration, both ways together.

    The direction with more takes `seconds`, which are `share` per cent of the iteration.
    """

    between: str
    delay_ms: float | None
    gbps: float | None
    gb: float
    seconds: float | None = None
    share: float = 0.0


def link_rows(plan: Plan, topology: Topology) -> Iterator[LinkRow]:
    """Yield every link of the topology, and loads that no link of it has a name for."""
    loads = dict(plan.predicted.wan_gb_per_iteration)
    for link in topology.links:
        first, second = link.between
        there, back = loads.pop(f"{first}-{second}", 0.0), loads.pop(f"{second}-{first}", 0.0)
        gb, busier = there + back, max(there, back)
        seconds = link.delay_ms / 1e3 + 8 * busier / link.gbps if link.gbps > 0 and gb else None
        share = 100 * (seconds or 0.0) / (plan.predicted.iteration_seconds or 1)
        yield LinkRow(f"{first} – {second}", link.delay_ms, link.gbps, gb, seconds, min(100.0, round(share, 2)))
    for name, gb in loads.items():
        yield LinkRow(name, None, None, gb)
