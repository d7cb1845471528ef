"""Measured links for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from hetrl.describe.measured_links import MeasuredLinks, Probed, Throughput

WHEN = datetime(2026, 11, 21, 12, tzinfo=UTC)


def probed(source: str, target: str, gbps: float = 1.0, delay_ms: float = 5.0, way: str = "direct") -> Probed:
    """One direction whose best number of streams, 4, brings `gbps`."""
    throughput = (Throughput(1, 0.5, (gbps / 2, gbps / 2)), Throughput(4, 0.5, (0.9 * gbps, 1.1 * gbps)))
    return Probed(source, target, way, (2 * delay_ms, 2 * delay_ms, 9 * delay_ms), throughput)


def measured_links(*links: Probed, **changes: Any) -> MeasuredLinks:
    """A file with these links."""
    return MeasuredLinks(**{"measured_at": WHEN, "command": "hetrl probe", "links": links, **changes})
