"""What `hetrl probe` prints: each direction of each link beside what is written of it, and what was not measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from hetrl.describe.measured_links import MeasuredLinks, Probed, percentile
from hetrl.describe.sites import ScenarioFile
from hetrl.report.tables import add_row, new_table
from hetrl.report.text import figure

PERCENTS = (50, 95, 99)
ROUND_TRIPS = "ms, p50/95/99"


def tables(measured: MeasuredLinks, scenario: ScenarioFile) -> RenderableType:
    """Return the links, the nodes inside sites, and a line for each thing that was not measured."""
    parts: list[RenderableType] = []
    if measured.links:
        written = {frozenset(link.between): f"{figure(link.gbps)} Gbps" for link in scenario.links}
        table = new_table("Links", "from, to", "by", ROUND_TRIPS, _streams(measured.links), "written")
        for one in measured.links:
            ends = (f"{one.source}, {one.target}", one.way, _round_trips(one), _gbps(one))
            add_row(table, *ends, written.get(frozenset((one.source, one.target)), "nothing"))
        parts.append(table)
    if measured.nodes:
        table = new_table("Between two nodes of a site", "site", "by", ROUND_TRIPS, _streams(measured.nodes))
        for one in measured.nodes:
            add_row(table, one.source, one.way, _round_trips(one), _gbps(one))
        parts.append(table)
    parts += [Text(f"not measured: {one.what}: {one.why}") for one in measured.skipped]
    return Group(*parts)


def _round_trips(one: Probed) -> str:
    return "/".join(figure(percentile(one.round_trip_ms, percent)) for percent in PERCENTS)


def _streams(probed: Sequence[Probed]) -> str:
    """Name the column of throughputs; one probe tries the same numbers of streams everywhere."""
    counts = [str(each.streams) for each in probed[0].throughput]
    return f"Gbps, {'/'.join(counts)} stream{'' if counts == ['1'] else 's'}"


def _gbps(one: Probed) -> str:
    return "/".join(figure(each.gbps) for each in one.throughput)
