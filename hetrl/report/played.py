"""A simulated iteration as bars over time, a row per group and site and one per link: coordinates for a template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetrl.plan.plan import Plan
from hetrl.report.chart import nice_ticks, tick_label
from hetrl.report.gantt import is_asynchronous
from hetrl.report.page import SHORT, Mark, mark_of_device, marks
from hetrl.report.text import figure, spoken
from hetrl.simulator import Simulated, Span as Event

GAP = 0.004  # of the width: shorter pauses are drawn over
_LABEL = 6.0  # per cent of the width that a label needs


@dataclass(frozen=True)
class Busy:
    """A bar: left edge and width in per cent, what it says, and the same in words."""

    left: float
    width: float
    label: str
    title: str


@dataclass(frozen=True)
class PlayedRow:
    """The devices of one group at one site, or one direction of a link (without a mark)."""

    name: str
    mark: Mark | None
    bars: tuple[Busy, ...]
    busy: float  # per cent of the window, of the busiest device


@dataclass(frozen=True)
class Played:
    """The window that is drawn, its rows and ticks (per cent, label)."""

    seconds: float
    rows: tuple[PlayedRow, ...]
    ticks: tuple[tuple[float, str], ...]


def played(plan: Plan, found: Simulated) -> Played:
    """Return the last iteration of a synchronous play, the last two of an asynchronous one."""
    end = max(span.start + span.seconds for span in found.spans)
    count = 2 if is_asynchronous(plan) else 1
    start = max(end - count * found.iteration_seconds, 0.0)
    spans = [span for span in found.spans if span.start + span.seconds > start]
    mark_of = mark_of_device(plan)
    rows: dict[tuple[str, str], list[Event]] = {}
    for span in spans:
        mark = mark_of.get(span.thread)
        way = f"{span.site} {span.thread.split(' #')[0]}"
        rows.setdefault((mark.letter, span.site) if mark else ("~", way), []).append(span)
    by_letter = {mark.letter: mark for mark in marks(plan)}
    drawn = [_row(site, by_letter.get(letter), rows[letter, site], (start, end)) for letter, site in sorted(rows)]
    ticks = nice_ticks(0.0, end - start, 6)
    placed = tuple((round(100 * at / (end - start), 3), tick_label(at, ticks)) for at in ticks if at <= end - start)
    return Played(end - start, tuple(drawn), placed)


def _row(name: str, mark: Mark | None, spans: Sequence[Event], window: tuple[float, float]) -> PlayedRow:
    start, end = window
    by_task: dict[str, list[Event]] = {}
    for span in spans:
        by_task.setdefault(span.category if mark else "", []).append(span)
    bars = [
        _bar(task, left, right, window)
        for task, some in by_task.items()
        for left, right in _union(some, window, GAP * (end - start))
    ]
    return PlayedRow(name, mark, tuple(sorted(bars, key=lambda bar: bar.left)), _busiest(spans, window))


def _bar(task: str, left: float, right: float, window: tuple[float, float]) -> Busy:
    start, end = window
    width = 100 * (right - left) / (end - start)
    label = SHORT.get(task, task) if width >= _LABEL else ""
    title = f"{spoken(task) or 'transfers'}: {figure(left - start)} to {figure(right - start)} s"
    return Busy(round(100 * (left - start) / (end - start), 3), round(width, 3), label, title)


def _busiest(spans: Sequence[Event], window: tuple[float, float]) -> float:
    """Return the share of the window in which the busiest device, or the link, had something to do."""
    threads: dict[str, list[Event]] = {}
    for span in spans:
        threads.setdefault(span.thread.split(" #")[0], []).append(span)
    times = [sum(right - left for left, right in _union(some, window, 0.0)) for some in threads.values()]
    return 100 * max(times) / (window[1] - window[0])


def _union(spans: Iterable[Event], window: tuple[float, float], gap: float) -> list[tuple[float, float]]:
    """Return the times inside the window in which any of the spans goes on; gaps up to `gap` are closed."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        left, right = max(span.start, window[0]), min(span.start + span.seconds, window[1])
        if right <= left:
            continue
        if merged and left <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], right))
        else:
            merged.append((left, right))
    return merged
