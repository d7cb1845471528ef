"""The plan as one HTML page that needs nothing else: sites and devices, times and what they wait for, links, why."""

from __future__ import annotations

from hetrl.cost.charges import asked_for, has_prices
from hetrl.explanation import Curve, Explanation
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan
from hetrl.report import reasons
from hetrl.report.chart import Chart, step_chart
from hetrl.report.device_map import device_map
from hetrl.report.gantt import gantt
from hetrl.report.page import SHORT, mark_of_task, marks, render
from hetrl.report.played import Played
from hetrl.report.rows import link_rows, servers, task_rows
from hetrl.report.text import compact_devices, figure
from hetrl.workload import Workload

_COLOURS = {  # class of the style sheet -> what the legend says
    "compute": "products on the GPUs",
    "memory": "memory of the GPUs",
    "fixed": "launches and calls",
    "inside": "inside nodes and sites",
    "link": "links between sites",
}


def plan_page(
    plan: Plan,
    topology: Topology,
    workload: Workload,
    explanation: Explanation | None = None,
    played: Played | None = None,
) -> str:
    """Return the page; it is self-contained HTML, and every name in it is escaped.

    With an explanation it says what binds, and why; with a played iteration, what each group and link does when.
    """
    links = list(link_rows(plan, topology))
    return render(
        "plan.html.j2",
        plan=plan,
        workload=workload,
        topology=topology,
        used=len(plan.devices),
        marks=marks(plan),
        mark_of_task=mark_of_task(plan),
        short=SHORT,
        sites=device_map(plan, {device.id: device.gpu for device in topology.devices}),
        rows=task_rows(plan),
        compact_devices=compact_devices,
        servers=servers,
        gantt=gantt(plan, []),
        loaded=sorted((row for row in links if row.gb), key=lambda row: -row.gb),
        unloaded=[row for row in links if not row.gb],
        found=explanation,
        reasons=reasons,
        slices=_slices(explanation) if explanation else {},
        longest=_longest_answer(explanation),
        asked=asked_for(plan, topology) if has_prices(topology) else (),
        curve=_curve_chart(explanation.curve) if explanation and explanation.curve else None,
        colours=_COLOURS,
        played=played,
    )


def _slices(found: Explanation) -> dict[str, list[tuple[str, float, str]]]:
    """Return what each time waits for as (class of the colour, per cent, what it says), in the order of the legend."""
    slices = {}
    for name, all_parts in found.binds.items():
        parts = [part for part in all_parts if part.seconds > 0]
        total = sum(part.seconds for part in parts)
        ordered = sorted(parts, key=lambda part: list(_COLOURS).index(_colour(part.name)))
        slices[name] = [
            (_colour(part.name), round(100 * part.seconds / total, 2), f"{part.name} {figure(part.seconds)} s")
            for part in ordered
        ]
    return slices


def _colour(resource: str) -> str:
    """Return the class of a resource's colour."""
    for ending, colour in (("compute", "compute"), ("memory bandwidth", "memory"), ("launches and calls", "fixed")):
        if resource.endswith(ending):
            return colour
    return "link" if resource.startswith("link ") else "inside"


def _curve_chart(found: Curve) -> Chart:
    """Return throughput over price, the plan at hand marked."""
    points = [(point.price_per_hour, point.samples_per_second) for point in found.points]
    own = (found.own.price_per_hour, found.own.samples_per_second, "this plan")
    return step_chart("Samples per second", points, own, "price per hour")


def _longest_answer(found: Explanation | None) -> float:
    """Return the value that the bars of the what-ifs are scaled to."""
    answers = found.study.what_ifs if found and found.study else ()
    return max((answer.value for answer in answers if answer.value is not None), default=1.0)
