"""The plan as one HTML page that needs nothing else: sites and devices, tasks, predicted times, links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hetrl.hardware import Topology
from hetrl.plan import Plan
from hetrl.report.device_map import busy_devices, device_map
from hetrl.report.page import SHORT, Bar, bars, mark_of_task, marks, render
from hetrl.report.rows import task_rows
from hetrl.report.text import compact_devices, figure, spoken
from hetrl.workload import Workload


@dataclass(frozen=True)
class LinkRow:
    """One link; `gb` crosses it in an iteration and takes `seconds`, `share` per cent of the iteration."""

    between: str
    delay_ms: float | None
    gbps: float | None
    gb: float
    seconds: float | None = field(default=None)
    share: float = 0.0


def plan_page(plan: Plan, topology: Topology, workload: Workload) -> str:
    """Return the page; it is self-contained HTML, and every name in it is escaped."""
    links = list(_link_rows(plan, topology))
    return render(
        "plan.html.j2",
        plan=plan,
        workload=workload,
        topology=topology,
        used=len(busy_devices(plan)),
        marks=marks(plan),
        mark_of_task=mark_of_task(plan),
        short=SHORT,
        sites=device_map(plan, {device.id: device.gpu for device in topology.devices}),
        rows=task_rows(plan),
        compact_devices=compact_devices,
        bars=_task_bars(plan),
        loaded=sorted((row for row in links if row.gb), key=lambda row: -row.gb),
        unloaded=[row for row in links if not row.gb],
    )


def _task_bars(plan: Plan) -> list[Bar]:
    of_task = mark_of_task(plan)
    return bars(
        (spoken(name), seconds, f"{figure(seconds)} s", of_task.get(name))
        for name, seconds in plan.predicted.tasks.items()
    )


def _link_rows(plan: Plan, topology: Topology) -> Iterator[LinkRow]:
    """Yield every link of the topology, and loads that no link of it has a name for."""
    loads = dict(plan.predicted.wan_gb_per_iteration)
    for link in topology.links:
        first, second = link.between
        gb = loads.pop(f"{first}-{second}", 0.0) + loads.pop(f"{second}-{first}", 0.0)
        seconds = link.delay_ms / 1e3 + 8 * gb / link.gbps if link.gbps > 0 and gb else None
        share = 100 * (seconds or 0.0) / (plan.predicted.iteration_seconds or 1)
        yield LinkRow(f"{first} – {second}", link.delay_ms, link.gbps, gb, seconds, min(100.0, round(share, 2)))
    for name, gb in loads.items():
        yield LinkRow(name, None, None, gb)
