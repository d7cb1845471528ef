"""The page of the bench `paper`: its cells, the definitions of the rivals, what the simulator plays, trends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from statistics import mean
from typing import Any

from _paper_figures import (
    PLAYED,
    PREDICTED,
    RATIOS,
    Cell,
    Outcome,
    Range,
    Trend,
    agreement,
    cells,
    change,
    count,
    definitions,
    inside,
    lost,
    pairs,
    slow,
    with_worst_seeds,
)
from _paper_plans import Made, label
from _paper_played import second_half
from _paper_words import of_sample, sampled, span, table, verdict, words, yes

from hetrl.workload import ACTOR_GENERATION, INFERENCES, TRAININGS


def page(outcome: Outcome, trends: Sequence[Trend], alone_range: Range) -> tuple[str, dict[str, Any]]:
    """Return the benchmark's part of the page, and the figures that the result keeps."""
    found = {name: cells(outcome, definition) for name, definition in definitions(outcome).items()}
    parts = [
        _head(outcome, found),
        _cell_table(outcome, next(iter(found))),
        _definitions(outcome, found),
        _pace(outcome),
        _trends(outcome, found, trends),
        second_half(outcome, alone_range),
    ]
    return "\n".join(line for part in parts for line in part), _figures(outcome, found)


Found = Mapping[str, Sequence[Cell]]  # the cells under each definition


def _figures(outcome: Outcome, found: Found) -> dict[str, Any]:
    widened_by, counts = outcome.knobs.widened_by, {}
    for name, some in found.items():
        counts[name] = {
            "cells": len(some),
            **{how: count(some, how) for how in (PREDICTED, PLAYED)},
            **{f"{how}_widened": count(some, how, widened_by) for how in (PREDICTED, PLAYED)},
            "means": {f"{cell.ratio} {cell.scenario}": mean(cell.ours[PREDICTED]) for cell in some},
        }
    return {
        "inside": counts,
        "slow": [label(made.asked) for made in slow(outcome)],
        "lost": [[label(made.asked) for made in pair] for pair in lost(outcome)],
        "simulator_agrees": agreement(outcome),
    }


def _head(outcome: Outcome, found: Found) -> Iterator[str]:
    knobs = outcome.knobs
    part = "all models" if outcome.full else f"{sampled(outcome)} only; `FULL=1` runs all models"
    steps = (
        f"{knobs.optimizer_steps} optimiser steps, {knobs.gradient_dtype} reduction, staleness {knobs.max_staleness}"
    )
    counts = {name: count(some, PREDICTED, knobs.widened_by) for name, some in found.items()}
    first, best = next(iter(counts)), max(counts, key=lambda name: counts[name])
    yield (
        f"Throughput of `{knobs.planner}` over other systems, against the ranges that the HetRL paper reports: means "
        f"over models and algorithms, predicted by our model and played by the simulator ({part}; {steps}). Each plan "
        f"of `{knobs.planner}` is the best of {len(knobs.seeds)} seeds with {knobs.evaluations:,} evaluations each; no "
        f"clock decides. With the rivals as the solvers plan (`{first}`), {counts[first]} of {len(found[first])} cells "
        f"lie in the range widened by {knobs.widened_by:.0%}, {count(found[first], PREDICTED)} in the paper's own; the "
        f"most that a definition of the rivals reaches is {counts[best]}, `{best}` (to reach: {knobs.cells_to_reach} "
        "of 11 with one definition). [baselines.md](baselines.md) says how the others are planned."
    )
    yield ""


def _cell_table(outcome: Outcome, name: str) -> Iterator[str]:
    share = outcome.knobs.widened_by
    yield f"Rivals: `{name}`. In brackets: inside the paper's range, and inside it widened by {share:.0%}."
    yield ""
    yield from table("ratio", "scenario", "paper", "widened", "predicted", "least to most", "played", "least to most")
    for cell in cells(outcome):
        low, high = cell.paper
        bounds = f"{low:.2f} to {high:.2f} | {low * (1 - share):.2f} to {high * (1 + share):.2f}"
        shown = (
            f"{mean(own):.2f} ({yes(inside(mean(own), cell.paper))}, {yes(inside(mean(own), cell.paper, share))}) "
            f"| {span(own)}"
            for own in (cell.ours[PREDICTED], cell.ours[PLAYED])
        )
        yield f"| {words(cell.ratio)} | {cell.scenario} | {bounds} | {' | '.join(shown)} |"
    yield ""


def _definitions(outcome: Outcome, found: Found) -> Iterator[str]:
    widened_by = outcome.knobs.widened_by
    yield (
        "The same cells under other definitions of what verl and StreamRL do with unequal GPUs, each for all cells "
        "([baselines.md](baselines.md#definitions)): predicted means; in the paper's range, in the widened one, or out."
    )
    yield ""
    yield from table("ratio", "scenario", "paper", *found)
    known = [{(cell.ratio, cell.scenario): mean(cell.ours[PREDICTED]) for cell in some} for some in found.values()]
    for ratio, scenario in dict.fromkeys(place for means in known for place in means):
        bounds = outcome.paper[ratio][scenario]
        means = [own.get((ratio, scenario)) for own in known]
        shown = " | ".join("none" if v is None else f"{v:.2f} {verdict(v, bounds, widened_by)}" for v in means)
        yield f"| {words(ratio)} | {scenario} | {bounds[0]:.2f} to {bounds[1]:.2f} | {shown} |"
    for how, share in product((PREDICTED, PLAYED), (0.0, widened_by)):
        counts = " | ".join(f"{count(some, how, share)} of {len(some)}" for some in found.values())
        yield f"| inside, {how} | | {'widened' if share else 'the range'} | {counts} |"
    worst = with_worst_seeds(outcome)
    unlucky = [cells(worst, definition) for definition in definitions(outcome).values()]
    counts = " | ".join(f"{count(some, PREDICTED, widened_by)} of {len(some)}" for some in unlucky)
    yield f"| inside, predicted, worst seeds | | widened | {counts} |"
    yield ""


def _pace(outcome: Outcome) -> Iterator[str]:
    """Yield what the parts of an iteration take in the rivals' plans, under each definition."""
    known = definitions(outcome)
    yield (
        f"Seconds of generation, inferences and trainings in the rivals' plans ({sampled(outcome)}): what the slowest "
        "GPU decides goes down when samples are divided by speed, what links decide stays."
    )
    yield ""
    yield from table("rival", "scenario", *known)
    for kind, scenario in product((RATIOS["sync_over_verl"], RATIOS["async_over_streamrl"]), outcome.scenarios):
        plans = [pairs(outcome, kind, scenario, definition) for definition in known.values()]
        rivals = [[_parts(theirs) for own, theirs in some if of_sample(own, outcome)] for some in plans]
        if any(rivals):
            yield f"| {kind.rival} | {scenario} | {' | '.join(next(iter(some), 'none') for some in rivals)} |"
    yield ""


def _parts(made: Made) -> str:
    kinds = ((ACTOR_GENERATION,), INFERENCES, TRAININGS)
    seconds = made.tasks or {}
    return ", ".join(f"{sum(seconds.get(name, 0.0) for name in kind):.0f}" for kind in kinds)


def _trends(outcome: Outcome, found: Found, trends: Sequence[Trend]) -> Iterator[str]:
    widened_by, missed = outcome.knobs.widened_by, []
    yield (
        "Trends: by what factor a ratio changes from one cell to another, the paper's at the middles of its ranges; "
        f"`no`: ours is not within {widened_by:.0%} of it."
    )
    yield ""
    yield from table("from", "to", "paper", *found)
    for trend in trends:
        changes = [change(trend, some) for some in found.values()]
        if not any(changes):
            continue
        paper = next(both[0] for both in changes if both)
        kept = [both and inside(both[1], (paper, paper), widened_by) for both in changes]
        missed += [trend] if kept[0] is False else []
        shown = (
            f"{both[1]:.2f}{'' if same else ' no'}" if both else "none"
            for both, same in zip(changes, kept, strict=True)
        )
        yield f"| {_place(trend.to)} | {_place(trend.of)} | {paper:.2f} | {' | '.join(shown)} |"
    yield ""
    if missed:
        yield f"Not reproduced with `{next(iter(found))}`, and the likely reason:"
        yield ""
        yield from (f"- {_place(trend.to)}, to {_place(trend.of)}: {trend.reason}." for trend in missed)
        yield ""


def _place(cell: tuple[str, str]) -> str:
    return f"{words(cell[0])}, {cell[1]}"
