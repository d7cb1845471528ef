"""How much of a run's time went into the steps that count, and what each fault cost, by its rows of metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetrl.workload import ITERATION

Row = Mapping[str, Any]


@dataclass(frozen=True)
class FaultCost:
    """A fault, the first step that ended behind it, and by how much the steps that it touched were late."""

    what: str
    step: int
    seconds: float


def goodput(rows: Sequence[Row], elapsed_seconds: float) -> float:
    """Return the seconds of all steps over those that have passed since the first start."""
    seconds: float = sum(row["seconds"][ITERATION] for row in rows)
    return seconds / elapsed_seconds


def fault_costs(rows: Sequence[Row]) -> list[FaultCost]:
    """Return the faults that the rows name (`faults`) in the order in which they were met.

    A step is late by the time from the end of the step before to its own, beyond the median of the steps without a
    fault (of all, where each has one). Faults that touched the same step share that evenly.
    """
    spans = _spans(rows)
    free = [span for span, row in zip(spans, rows, strict=True) if not row.get("faults")]
    usual = statistics.median(free or spans or [0.0])
    costs, first = dict[str, float](), dict[str, int]()
    for span, row in zip(spans, rows, strict=True):
        for what in (faults := row.get("faults", ())):
            first.setdefault(what, row["step"])
            costs[what] = costs.get(what, 0.0) + (span - usual) / len(faults)
    return [FaultCost(what, first[what], max(seconds, 0.0)) for what, seconds in costs.items()]


def _spans(rows: Sequence[Row]) -> list[float]:
    """Return how long each step took since the one before; the first one as long as it says, without the start."""
    spans = list[float]()
    before = None
    for row in rows:
        end = row.get("elapsed_seconds")
        spans.append(row["seconds"][ITERATION] if before is None or end is None else end - before)
        before = end
    return spans
