"""Line charts and histograms as coordinates: pure arithmetic, the templates draw them as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from hetrl.report.text import figure

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 14, 40
_MOST_DOTS = 60
_MOST_COLUMNS = 10
_NOTHING = 1e-30  # smaller values are drawn as zero


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where it is and what it says."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """One series, ready to draw: polylines (a gap starts another), dots, axes and a sentence for who cannot see it.

    `marked` is a point of its own, with what it says.
    """

    title: str
    lines: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_label: str
    summary: str
    marked: tuple[float, float, str] | None = None


@dataclass(frozen=True)
class Column:
    """One column of a histogram, with its label below and what it counts above."""

    left: float
    top: float
    width: float
    height: float
    label: str
    count: str


@dataclass(frozen=True)
class Histogram:
    """Counts of whole numbers, ready to draw."""

    title: str
    columns: tuple[Column, ...]
    x_label: str
    summary: str


def line_chart(
    title: str, points: Sequence[tuple[float, float | None]], x_label: str = "step", log: bool = False
) -> Chart:
    """Return the chart of (x, y) points in the order of x; a missing or infinite y is a gap.

    With `log` the y axis counts powers of ten, and what is not above zero is a gap.
    """
    points = [(x, y if y is not None and math.isfinite(y) and (y > 0 or not log) else None) for x, y in points]
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return Chart(title, (), (), (), (), x_label, f"{title}: no values")
    ys = [y for _, y in known]
    first, last = known[0][0], known[-1][0]
    x_marks = _whole(nice_ticks(first if last / 2 < first < last else 0.0, last, 6))
    y_marks = powers_of_ten(min(ys), max(ys)) if log else nice_ticks(min(ys), max(ys), 5)
    x_range, y_range = (min(x_marks[0], first), max(x_marks[-1], last)), (y_marks[0], y_marks[-1])
    placed = {x: (_across(x, x_range), _up(y, y_range, log)) for x, y in known}
    alone = len(known) <= _MOST_DOTS
    labels = [f"{y:.0e}".replace("e-0", "e-").replace("e+0", "e") if log else tick_label(y, y_marks) for y in y_marks]
    return Chart(
        title=title,
        lines=tuple(" ".join(f"{a:.1f},{b:.1f}" for a, b in run) for run in _runs(points, placed)),
        dots=tuple((round(a, 1), round(b, 1)) for a, b in placed.values()) if alone else (),
        x_ticks=tuple(Tick(round(_across(x, x_range), 1), f"{x:g}") for x in x_marks),
        y_ticks=tuple(Tick(round(_up(y, y_range, log), 1), said) for y, said in zip(y_marks, labels, strict=True)),
        x_label=x_label,
        summary=f"{title}: from {figure(ys[0])} to {figure(ys[-1])}, "
        f"lowest {figure(min(ys))}, highest {figure(max(ys))}",
    )


def step_chart(
    title: str, points: Sequence[tuple[float, float]], marked: tuple[float, float, str], x_label: str
) -> Chart:
    """Return the chart of (x, y) points in the order of x, both axes from zero: y stays the same up to the next x.

    `marked` is a point with its label, on the line or not. There is at least one point, and nothing is below zero.
    """
    every = [*points, marked[:2]]
    x_marks, y_marks = (nice_ticks(0.0, max(point[axis] for point in every), 6) for axis in (0, 1))
    x_range, y_range = (x_marks[0], x_marks[-1]), (y_marks[0], y_marks[-1])
    placed = [(round(_across(x, x_range), 1), round(_up(y, y_range, False), 1)) for x, y in every]
    corners = [(x, y) for (x, _), (_, y) in zip(placed[1:-1], placed, strict=False)]
    line = [at for pair in zip_longest(placed[:-1], corners) for at in pair if at is not None]
    said = ", ".join(f"{figure(y)} for {figure(x)}" for x, y in points)
    return Chart(
        title=title,
        lines=(" ".join(f"{x},{y}" for x, y in line),) if len(line) > 1 else (),
        dots=tuple(placed[:-1]),
        x_ticks=tuple(Tick(round(_across(x, x_range), 1), f"{x:g}") for x in x_marks),
        y_ticks=tuple(Tick(round(_up(y, y_range, False), 1), tick_label(y, y_marks)) for y in y_marks),
        x_label=x_label,
        summary=f"{title}: {said}; {marked[2]} {figure(marked[1])} for {figure(marked[0])}",
        marked=(*placed[-1], marked[2]),
    )


def histogram(title: str, counts: Mapping[int, int], x_label: str) -> Histogram:
    """Return a column per number from the lowest to the highest; with too many, the last one is that number or more."""
    if not counts:
        return Histogram(title, (), x_label, f"{title}: no values")
    low, high = min(counts), max(counts)
    last = min(high, low + _MOST_COLUMNS - 1)
    found = [(f"{number}", counts.get(number, 0)) for number in range(low, last)]
    more = sum(count for number, count in counts.items() if number >= last)
    found.append((f"{last} or more" if high > last else f"{last}", more))
    total, highest = sum(counts.values()) or 1, max(count for _, count in found) or 1
    room = (WIDTH - LEFT - RIGHT) / len(found)
    width, tallest = min(0.7 * room, 90.0), HEIGHT - TOP - BOTTOM - 20
    columns = [
        Column(
            left=round(LEFT + room * (index + 0.5) - width / 2, 2),
            top=round(HEIGHT - BOTTOM - tallest * count / highest, 2),
            width=round(width, 2),
            height=round(tallest * count / highest, 2),
            label=label,
            count=f"{count:,} ({figure(100 * count / total)} %)" if len(found) <= 4 else f"{count:,}",
        )
        for index, (label, count) in enumerate(found)
    ]
    said = ", ".join(f"{count:,} of {label}" for label, count in found)
    return Histogram(title, tuple(columns), x_label, f"{title} ({x_label}): {said}")


def powers_of_ten(low: float, high: float) -> list[float]:
    """Return powers of ten that enclose [low, high], both above zero; at least two and about six."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    step = math.ceil((last - first) / 6)
    last = first + step * math.ceil((last - first) / step)
    return [float(f"1e{power}") for power in range(first, last + 1, step)]


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or size < _NOTHING:  # no difference that an axis could show
        spread = size / 2 if size >= _NOTHING else 0.5
        low, high = low - spread if size >= _NOTHING else 0.0, high + spread
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def tick_label(value: float, marks: Sequence[float]) -> str:
    """Return a label with the digits that the distance of the marks needs."""
    largest = max(map(abs, marks))
    if not 1e-3 <= largest < 1e5:
        number, _, power = f"{value:.2e}".partition("e")
        return f"{float(number):g}e{int(power)}" if value else "0"
    step = marks[1] - marks[0]
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _whole(marks: list[float]) -> list[float]:
    """Keep what can be the number of a step."""
    whole = [mark for mark in marks if mark == int(mark) and mark >= 0]
    return whole or [0.0, 1.0]


def _across(x: float, limits: tuple[float, float]) -> float:
    return LEFT + (x - limits[0]) / (limits[1] - limits[0] or 1) * (WIDTH - LEFT - RIGHT)


def _up(y: float, limits: tuple[float, float], log: bool) -> float:
    low, high = (math.log10(limit) for limit in limits) if log else limits
    return HEIGHT - BOTTOM - ((math.log10(y) if log else y) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _runs(
    points: Sequence[tuple[float, float | None]], placed: dict[float, tuple[float, float]]
) -> list[list[tuple[float, float]]]:
    grouped = groupby(points, key=lambda point: point[1] is not None)
    runs = [[placed[x] for x, _ in run] for known, run in grouped if known]
    return [run for run in runs if len(run) > 1]
