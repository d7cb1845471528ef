"""How the pages of the bench `paper` say things: tables, ranges, where a value lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from _paper_figures import Outcome, Range, inside
from _paper_plans import Made

IN, WIDENED, OUT = "in", "widened", "out"


def verdict(value: float, bounds: Range, widened_by: float) -> str:
    """Return where a value lies: in the range, in the widened one alone, or out of both."""
    return IN if inside(value, bounds) else WIDENED if inside(value, bounds, widened_by) else OUT


def sampled(outcome: Outcome) -> str:
    sample = outcome.knobs.sample
    return f"{', '.join(sample.models)}, {', '.join(sample.algorithms).upper()}"


def table(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]


def yes(value: bool) -> str:
    return "yes" if value else "no"


def words(ratio: str) -> str:
    return ratio.replace("_", " ")


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def of_sample(made: Made, outcome: Outcome) -> bool:
    case, sample = made.asked.case, outcome.knobs.sample
    return case.model in sample.models and case.algorithm in sample.algorithms


def listed(entries: Iterable[str]) -> str:
    return "; ".join(entries) or "none"
