"""What the HTML pages share: the templates' environment, the marks of groups, bars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hetrl.plan.plan import Plan
from hetrl.report import chart
from hetrl.report.text import byte_figure, duration, figure, spoken

# Okabe and Ito's palette (Color Universal Design, 2008), which stays apart under the usual colour blindnesses, each
# with a text colour of contrast 4.5 or more (WCAG 2.1, 1.4.3). The letter of a mark says the same as its colour.
PALETTE = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#56b4e9", "#000000"),
    ("#d55e00", "#000000"),
)
SHORT = {
    "actor_generation": "gen",
    "reference_inference": "ref",
    "reward_inference": "reward",
    "critic_inference": "value",
    "actor_training": "train",
    "critic_training": "critic",
}


@dataclass(frozen=True)
class Mark:
    """How a group is shown: a letter on a colour."""

    letter: str
    fill: str
    ink: str
    tasks: tuple[str, ...]

    @property
    def style(self) -> str:
        """Return the CSS of the mark's box."""
        return f"background:{self.fill};color:{self.ink}"


@dataclass(frozen=True)
class Bar:
    """A labelled bar; `share` is its length in per cent of the longest."""

    label: str
    value: str
    share: float


def marks(plan: Plan) -> list[Mark]:
    """Return the mark of each group, in the plan's order."""
    return [
        Mark(chr(ord("A") + index % 26), *PALETTE[index % len(PALETTE)], tasks=group.tasks)
        for index, group in enumerate(plan.groups)
    ]


def mark_of_device(plan: Plan) -> dict[str, Mark]:
    """Return the mark of the group that each device belongs to."""
    return {device: mark for mark, group in zip(marks(plan), plan.groups, strict=True) for device in group.devices}


def mark_of_task(plan: Plan) -> dict[str, Mark]:
    """Return the mark of the group of each task."""
    return {task: mark for mark in marks(plan) for task in mark.tasks}


def bars(values: Iterable[tuple[str, float, str]]) -> list[Bar]:
    """Return bars of (label, length, what it says), scaled to the longest."""
    rows = list(values)
    longest = max((length for _, length, _ in rows), default=0) or 1
    return [Bar(label, said, round(100 * length / longest, 2)) for label, length, said in rows]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hetrl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(figure=figure, byte_figure=byte_figure, duration=duration, spoken=spoken)
    environment.globals.update(
        width=chart.WIDTH, height=chart.HEIGHT, left=chart.LEFT, right=chart.RIGHT, top=chart.TOP, bottom=chart.BOTTOM
    )
    return environment


def render(template: str, **values: Any) -> str:
    """Return a page; every value is escaped."""
    return _environment().get_template(template).render(**values)
