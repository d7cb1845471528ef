"""A run as one HTML page that needs nothing else: curves, predicted against measured, weights, links, events."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetrl.plan import Plan
from hetrl.report.chart import Chart, line_chart
from hetrl.report.page import Bar, bars, render
from hetrl.report.text import byte_figure, figure, spoken

Row = Mapping[str, Any]
_CURVES = (("reward", "Reward"), ("loss", "Loss"), ("kl", "KL divergence"))
_MORE_CURVES = (
    ("grad_norm", "Gradient norm"),
    ("clip_fraction", "Clipped fraction"),
    ("entropy", "Entropy"),
    ("mismatch", "Log-prob mismatch, trainer and rollout"),
)
_ENDS = ("finished", "failed", "cancelled")
_BAD = ("fail", "lost", "fault", "drop", "abort", "cancel", "timeout")
_HEAD = ("time", "source", "sequence", "kind")
_MOST_EVENTS = 200


@dataclass(frozen=True)
class EventRow:
    """One event: seconds since the first, who, what, and what it carries."""

    seconds: float
    source: str
    kind: str
    carries: str
    bad: bool


def run_page(summary: Row, metrics: Sequence[Row], events: Sequence[Row], plan: Plan) -> str:
    """Return the page; `summary` is empty before the end, what it would say is then taken from the metrics."""
    rows = [row for row in metrics if "step" in row]
    told = [event for event in _event_rows(events) if event.kind != "step"]
    return render(
        "run.html.j2",
        summary=summary,
        plan=plan,
        title=summary.get("name") or "a run",
        run=summary.get("run", ""),
        phase=next((event["kind"] for event in reversed(events) if event.get("kind") in _ENDS), "running"),
        steps=summary.get("steps", len(rows)),
        reward_first=summary.get("reward_first", rows[0].get("reward") if rows else None),
        reward_last=summary.get("reward_last", rows[-1].get("reward") if rows else None),
        charts=_charts(rows),
        seconds=_seconds(summary, rows, plan),
        links=_link_bars(summary),
        versions=summary.get("weight_versions") or [],
        batches=summary.get("batch_versions") or [[row["step"], row.get("versions", {})] for row in rows],
        faults=[event for event in told if event.bad],
        events=told[-_MOST_EVENTS:],
        left_out=max(0, len(told) - _MOST_EVENTS),
    )


def _charts(rows: Sequence[Row]) -> list[Chart]:
    """Return reward, loss and KL always, the other curves where there are values."""
    always = [line_chart(title, _points(rows, key)) for key, title in _CURVES]
    iteration = [(row["step"], row.get("seconds", {}).get("iteration")) for row in rows]
    sent = [(row["step"], row["weight_bytes"] / 1e6 if "weight_bytes" in row else None) for row in rows]
    more = [line_chart("Seconds per step", iteration), line_chart("Megabytes per weight version", sent)]
    more += [line_chart(title, _points(rows, key)) for key, title in _MORE_CURVES]
    return always + [chart for chart in more if chart.y_ticks]


def _points(rows: Sequence[Row], key: str) -> list[tuple[float, float | None]]:
    return [(row["step"], row.get(key)) for row in rows]


def _seconds(summary: Row, rows: Sequence[Row], plan: Plan) -> list[tuple[str, Bar, Bar]]:
    """Return (task, predicted bar, measured bar) on one scale; measured is the median over the steps."""
    pairs = _predicted_and_measured(summary, rows, plan)
    drawn = bars(
        (name, value or 0.0, f"{figure(value)} s {how}" if value is not None else f"not {how}", None)
        for name, pair in pairs.items()
        for value, how in zip(pair, ("predicted", "measured"), strict=True)
    )
    return [(spoken(name), drawn[2 * index], drawn[2 * index + 1]) for index, name in enumerate(pairs)]


def _predicted_and_measured(
    summary: Row, rows: Sequence[Row], plan: Plan
) -> dict[str, tuple[float | None, float | None]]:
    if tasks := summary.get("tasks"):
        return {name: (both.get("predicted_seconds"), both.get("measured_seconds")) for name, both in tasks.items()}
    predicted = {**plan.predicted.tasks, "iteration": plan.predicted.iteration_seconds}
    measured = {name: [row["seconds"][name] for row in rows if name in row.get("seconds", {})] for name in predicted}
    return {name: (predicted[name], statistics.median(found) if found else None) for name, found in measured.items()}


def _link_bars(summary: Row) -> list[Bar]:
    return bars((name, count, byte_figure(count), None) for name, count in summary.get("bytes_per_link", {}).items())


def _event_rows(events: Sequence[Row]) -> Iterator[EventRow]:
    start = events[0].get("time", 0.0) if events else 0.0
    for event in events:
        kind = str(event.get("kind", ""))
        carries = ", ".join(f"{key}: {_short(value)}" for key, value in event.items() if key not in _HEAD)
        bad = any(word in kind for word in _BAD) or bool(event.get("code") and kind == "process_exited")
        yield EventRow(event.get("time", start) - start, str(event.get("source", "")), kind, carries, bad)


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_short(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_short, value))
    return figure(value) if isinstance(value, float) else str(value)
