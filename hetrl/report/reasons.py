"""What an explanation says in words, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hetrl.cost.charges import Asked
from hetrl.cost.objective import Measure
from hetrl.explanation.curve import Curve
from hetrl.explanation.idle import Idle
from hetrl.explanation.resources import Part
from hetrl.explanation.training_sites import Spread, TrainingSites
from hetrl.explanation.what_if import RunnerUp, WhatIf
from hetrl.explanation.worse_links import WorseLink
from hetrl.report.text import compact_devices, figure, spoken

_MOST = 3
_LEAST = 0.05  # of a time: smaller parts are not named


def waits_for(parts: Sequence[Part]) -> str:
    """Return the largest parts of a time: `link r4–r6 67 %, l40s: compute 25 %`; `nothing` where there are none."""
    total = sum(part.seconds for part in parts)
    named = [part for part in parts if part.seconds >= _LEAST * total][:_MOST]
    return ", ".join(f"{part.name} {part.seconds / total:.0%}".replace("%", " %") for part in named) or "nothing"


def training_reason(training: TrainingSites) -> str:
    """Return why training is in one site or in several, with the best that either could have."""
    sites, one, two = training.sites, training.one, training.two
    here = f"{', '.join(sites)}, {figure(training.seconds)} s"
    in_two = "" if training.why_not_two else f", in two {_spread(two)}"
    best = f"With nothing else on their GPUs it takes in one site {_spread(one)}{in_two}."
    if len(sites) > 1:
        if one is None:
            return f"Training is spread over {len(sites)} sites ({here}) because it fits into no site alone. {best}"
        more = one.seconds - training.seconds
        why = f"because one takes {figure(more)} s more" if more > 0 else "although one could be faster"
        return f"Training is spread over {len(sites)} sites ({here}) {why}. {best}"
    if two is None:
        why = training.why_not_two or "it fits into no two linked sites"
        return f"Training stays in one site ({here}) because {why}. {best}"
    if one is None or two.seconds >= one.seconds:
        return f"Training stays in one site ({here}) because two are slower. {best}"
    return f"Training stays in one site ({here}) although two could be faster: the plan has other work there. {best}"


def worse_links_reason(links: Sequence[WorseLink], iteration_seconds: float) -> str:
    """Return what the iteration would be where a link gives less than was measured."""
    each = (f"{one.link} {figure(one.seconds)} s ({change_text(one.seconds, iteration_seconds)})" for one in links)
    less = f"{100 * links[0].less:.0f} %"
    return f"Where a link gives {less} less than was measured, an iteration takes: {', '.join(each)}."


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "no time: it does not fit"
    sites = " + ".join(spread.sites)
    return f"{figure(spread.seconds)} s at best ({sites}, TP×PP×DP {spread.parallelism}: {waits_for(spread.parts)})"


def idle_reason(idle: Idle, iteration_seconds: float) -> str:
    """Return which GPUs are idle, and what would be if they were not."""
    head = f"{', '.join(compact_devices(idle.devices))} ({len(idle.devices)} × {idle.gpu})"
    if idle.task is None or idle.seconds is None:
        return f"{head}: no task can run there: {idle.why_not}"
    change = idle.seconds - iteration_seconds
    start = f"{head}: with {spoken(idle.task)} there too, an iteration takes {figure(idle.seconds)} s"
    changes = ", ".join(_signed(part.name, part.seconds) for part in idle.costs[:_MOST])
    if abs(change) <= 1e-3 * iteration_seconds:
        return f"{start}, no less: nobody waits for what they could do"
    if change > 0:
        return f"{start}, {figure(change)} s more: {changes}"
    outcome = "a longer search may use them" if idle.better else "it costs more than the objective gains"
    return f"{start}, {figure(-change)} s less ({changes}): {outcome}"


def _signed(name: str, seconds: float) -> str:
    return f"{name} {'+' if seconds > 0 else '−'}{figure(abs(seconds))} s"


def value_text(value: float | None, measure: Measure) -> str:
    """Return what an objective makes least, with its unit."""
    return "–" if value is None else f"{figure(value / measure.scale)} {measure.unit}".rstrip()


def change_text(value: float | None, own: float | None) -> str:
    """Return how much more or less than the plan's own it is: `−12 %`, `same` below half a per cent, `none found`."""
    if value is None:
        return "none found"
    if own is None:
        return "–"
    change = value / own - 1
    return "same" if abs(change) < 0.005 else f"{'+' if change > 0 else '−'}{100 * abs(change):.0f} %"


def asked_text(asked: Sequence[Asked]) -> str:
    """Return the GPUs that a plan asks for: `east 8 × a100-40gb + 16 × l4, west 16 × l4`."""
    by_site = groupby(asked, key=lambda one: one.site)
    return ", ".join(f"{site} {' + '.join(f'{one.gpus} × {one.gpu}' for one in some)}" for site, some in by_site)


def curve_reason(curve: Curve) -> str:
    """Return what the points of the curve are, and whether the plan at hand is one."""
    points = (
        "Each is the fastest plan found at its price or less; a price between two of them buys what the lower one does."
    )
    if curve.on_curve:
        return points
    own = curve.own
    better = max(
        (point for point in curve.points if point.price_per_hour <= own.price_per_hour),
        key=lambda point: point.samples_per_second,
    )
    return (
        f"{points} This plan, {figure(own.samples_per_second)} samples/s for {figure(own.price_per_hour)} per hour, is "
        f"not among them: {figure(better.samples_per_second)} samples/s are there for {figure(better.price_per_hour)}."
    )


def answer_text(answer: WhatIf) -> str:
    """Return how the answer came about."""
    return "this plan" if answer.same_plan else "" if answer.seconds is None else "another plan"


def runner_up_reason(runner_up: RunnerUp, iteration_seconds: float) -> str:
    """Return what the runner-up is and the terms in which it loses most."""
    groups = "; ".join(" + ".join(map(spoken, tasks)) for tasks in runner_up.groups)
    losses = sorted(runner_up.terms, key=lambda term: term.seconds - term.other_seconds)
    named = [
        _signed(spoken(term.name), term.other_seconds - term.seconds)
        for term in losses[:_MOST]
        if term.other_seconds - term.seconds > _LEAST * abs(runner_up.seconds - iteration_seconds)
    ]
    change = change_text(runner_up.seconds, iteration_seconds)
    outcome = "It loses by" if runner_up.seconds >= iteration_seconds else "It is faster, in spite of"
    return (
        f"{figure(runner_up.seconds)} s ({change}), found by {runner_up.found_by}, at {', '.join(runner_up.sites)}. "
        f"Groups: {groups}. " + (f"{outcome} {', '.join(named)}." if named else "")
    )
