"""Names and figures as tables and pages write them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

_UNITS = ("B", "kB", "MB", "GB", "TB")


def compact_devices(devices: Iterable[str]) -> list[str]:
    """Return the devices folded by node: `alps/a100-0/0-3`, and `alps/a100-[0-3]/0-7` for equal numbered nodes."""
    by_node: dict[str, set[int]] = {}
    for device in devices:
        node, index = device.rsplit("/", 1)
        by_node.setdefault(node, set()).add(int(index))
    folded: dict[tuple[str, str], list[int]] = {}
    for node, indices in by_node.items():
        match = re.fullmatch(r"(.*\D)(0|[1-9]\d*)", node)  # a range of numbers would lose the zero of 07
        prefix, number = (match[1], int(match[2])) if match else (node, -1)
        folded.setdefault((prefix, ranges(indices)), []).append(number)
    return [f"{prefix}{_numbers(numbers)}/{indices}" for (prefix, indices), numbers in folded.items()]


def _numbers(numbers: list[int]) -> str:
    if numbers == [-1]:
        return ""
    return str(numbers[0]) if len(numbers) == 1 else f"[{ranges(numbers)}]"


def ranges(numbers: Iterable[int]) -> str:
    """Return integers as ranges, `0-3,6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def figure(value: float | None) -> str:
    """Return a number with three significant digits and no exponent where it can be read without one."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits}f}"


def byte_figure(count: float) -> str:
    """Return bytes in decimal units: 1 GB is 1e9 bytes."""
    value, unit = float(count), _UNITS[0]
    for larger in _UNITS[1:]:
        if abs(value) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{figure(value)} {unit}"


def duration(seconds: float) -> str:
    """Return a time as people say it: `45 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def spoken(task: str) -> str:
    """Return a task's name as people say it: `actor training`."""
    return task.replace("_", " ")
