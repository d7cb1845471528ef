"""What each link between sites carries in an iteration of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetrl.hardware import Topology
from hetrl.plan.plan import Plan


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
