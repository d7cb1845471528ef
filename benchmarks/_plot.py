"""Line plots with logarithmic axes as SVG files that stand alone, in the colours of the reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hetrl.report.chart import powers_of_ten

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 170, 40, 46  # names of the lines stand at the right
LINE_HEIGHT = 17  # of the names
STYLE = """
 svg { background: #ffffff; font: 13px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
 text { fill: #5a626c; } .title { fill: #1a1d21; font-weight: 600; } .name { font-weight: 600; }
 .grid { stroke: #d9dde2; } .axis { stroke: #5a626c; }
 polyline { fill: none; stroke-width: 2; stroke-linejoin: round; } .dashed { stroke-dasharray: 6 4; }
 @media (prefers-color-scheme: dark) {
  svg { background: #14171a; } text { fill: #a4acb5; } .title { fill: #e8eaed; } .grid { stroke: #363c43; }
 }
"""

Axis = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points in the order of x, both above zero; lines of one name get it once. `steps`: y holds until the next x."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dashed: bool = False


def plot(title: str, x_label: str, lines: Sequence[Line], x_marks: Sequence[float] = ()) -> str:
    """Return the SVG of these lines; x is marked at powers of ten where no marks are given."""
    lines = [line for line in lines if line.points]
    xs, ys = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    across, up = x_marks or powers_of_ten(min(xs), max(xs)), _marks(min(ys), max(ys))
    x_axis, y_axis = (min(across[0], *xs), max(across[-1], *xs)), (up[0], up[-1])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
        *_axes(across, x_axis, up, y_axis, x_label),
    ]
    for line in lines:
        style = f'stroke="{line.colour}"' + (' class="dashed"' if line.dashed else "")
        at = " ".join(f"{_across(x, x_axis):.1f},{_up(y, y_axis):.1f}" for x, y in _corners(line))
        parts.append(f'<polyline {style} points="{at}"/>')
    return "\n".join([*parts, *_names(lines, y_axis), "</svg>", ""])


def _axes(across: Sequence[float], x_axis: Axis, up: Sequence[float], y_axis: Axis, x_label: str) -> list[str]:
    parts, floor, right = [], HEIGHT - BOTTOM, WIDTH - RIGHT
    for mark in up:
        y = round(_up(mark, y_axis), 1)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in across:
        x = round(_across(mark, x_axis), 1)
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{floor}" y2="{floor + 4}"/>')
        parts.append(f'<text x="{x}" y="{floor + 19}" text-anchor="middle">{mark:,g}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    middle = (LEFT + right) / 2
    return [*parts, f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>']


def _names(lines: Sequence[Line], y_axis: Axis) -> list[str]:
    """Write each name at the end of its (first) line, moved down where the one above is too near."""
    first = {line.name: line for line in reversed(lines)}
    ends = sorted((_up(line.points[-1][1], y_axis), line.name, line.colour) for line in first.values())
    parts, last = [], -math.inf
    for y, name, colour in ends:
        last = max(y, last + LINE_HEIGHT)
        at = f'x="{WIDTH - RIGHT + 8}" y="{last + 4:.1f}"'
        parts.append(f'<text class="name" style="fill: {colour}" {at}>{escape(name)}</text>')
    return parts


def _corners(line: Line) -> list[tuple[float, float]]:
    if not line.steps:
        return list(line.points)
    held = [(x, y) for (_, y), (x, _) in zip(line.points, line.points[1:], strict=False)]
    return [line.points[0], *(corner for pair in zip(held, line.points[1:], strict=True) for corner in pair)]


def _marks(low: float, high: float) -> list[float]:
    """Return marks at 1, 2 and 5 times powers of ten that enclose a range; finer ones where it is narrow."""
    factors = (1.0, 2.0, 5.0) if high > 4 * low else (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [float(f"{factor}e{power}") for power in powers for factor in factors]
    first = max((index for index, mark in enumerate(marks) if mark <= low * (1 + 1e-9)), default=0)
    last = min((index for index, mark in enumerate(marks) if mark >= high * (1 - 1e-9)), default=len(marks) - 1)
    return marks[first : max(last, first + 1) + 1]


def _across(x: float, axis: Axis) -> float:
    return LEFT + math.log(x / axis[0]) / math.log(axis[1] / axis[0]) * (WIDTH - LEFT - RIGHT)


def _up(y: float, axis: Axis) -> float:
    return HEIGHT - BOTTOM - math.log(y / axis[0]) / math.log(axis[1] / axis[0]) * (HEIGHT - TOP - BOTTOM)
