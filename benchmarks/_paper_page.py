"""The page of the bench `paper`: its cells, verl-expert, the simulator, the sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from _paper_cases import ASYNC, SYNC, Made, Outcome, Setting

from hetrl.search.baselines import TUNING

# A ratio of the paper: the rival and its mode, the mode of the planner's plan.
RATIOS = {
    "sync_over_verl": ("verl", SYNC, SYNC),
    "async_over_streamrl": ("streamrl", ASYNC, ASYNC),
    "async_over_verl": ("verl", SYNC, ASYNC),
}
OTHERS = {"sync over verl-expert": ("verl-expert", SYNC, SYNC), "async over areal-hex": ("areal-hex", ASYNC, ASYNC)}
Seconds = Callable[[Made], float | None]


def predicted(made: Made) -> float | None:
    """Return what the cost model says of a plan."""
    return made.seconds


def simulated(made: Made) -> float | None:
    """Return what the simulator says of a plan."""
    return made.simulated_seconds


def ratios(
    outcome: Outcome,
    kind: tuple[str, str, str],
    scenario: str,
    seconds: Seconds = predicted,
    setting: Setting | None = None,
) -> dict[tuple[str, str], float]:
    """Return, by model and algorithm, the rival's seconds over the planner's; those without a plan are left out."""
    rival, rival_mode, own_mode = kind
    found = {}
    for case, solver in outcome.made:
        if (case.scenario, case.mode, solver) != (scenario, rival_mode, rival):
            continue
        if case.setting != (setting or outcome.knobs.setting):
            continue
        own = outcome.made.get((replace(case, mode=own_mode), outcome.knobs.planner))
        theirs, ours = seconds(outcome.made[case, rival]), seconds(own) if own else None
        if ours and theirs:
            found[case.model, case.algorithm] = theirs / ours
    return found


def scenarios(outcome: Outcome) -> list[str]:
    """Return the scenarios that were run."""
    return list(dict.fromkeys(case.scenario for case, _ in outcome.made))


def page(outcome: Outcome) -> tuple[str, dict[str, Any]]:
    """Return the benchmark's part of the page, and the figures that the result keeps."""
    cells = list(_cells(outcome))
    inside = sum(cell["inside"] for cell in cells)
    expert = [value for name in scenarios(outcome) for value in ratios(outcome, OTHERS[_EXPERT], name).values()]
    agreeing, played = _agreement(outcome)
    figures = {"cells": cells, "cells_inside": inside, "simulator_agrees": agreeing, "simulator_played": played}
    figures |= {"expert_mean": mean(expert), "expert_least": min(expert)} if expert else {}
    return "\n".join([*_head(outcome, cells, inside), *_cell_table(cells), *_rest(outcome, figures)]), figures


_EXPERT = "sync over verl-expert"


def _cells(outcome: Outcome) -> Iterator[dict[str, Any]]:
    widened = outcome.knobs.widened_by
    for name, ranges in outcome.paper.items():
        for scenario, (low, high) in ranges.items():
            own = list(ratios(outcome, RATIOS[name], scenario).values())
            if own:
                inside = low * (1 - widened) <= mean(own) <= high * (1 + widened)
                figures = {"mean": mean(own), "least": min(own), "most": max(own), "paper": [low, high]}
                yield {"ratio": name, "scenario": scenario, **figures, "inside": inside}


def _head(outcome: Outcome, cells: list[dict[str, Any]], inside: int) -> list[str]:
    knobs = outcome.knobs
    part = "all models" if outcome.full else f"{', '.join(knobs.sample.models)} only; `FULL=1` runs all models"
    steps = (
        f"{knobs.optimizer_steps} optimiser steps, {knobs.gradient_dtype} reduction, staleness {knobs.max_staleness}"
    )
    return [
        f"Throughput of `{knobs.planner}` ({knobs.budget_seconds[knobs.planner]:g} s each) over other systems, "
        f"predicted by our model ({part}; {steps}), against the ranges that the HetRL paper reports: the mean over "
        f"models and algorithms lies in the range widened by {knobs.widened_by:.0%} in {inside} of {len(cells)} cells "
        f"(to reach: {knobs.cells_to_reach} of 11). The knobs were fixed beforehand in `benchmarks/paper.yaml`; "
        "[baselines.md](baselines.md) says how the others are planned.",
        "",
    ]


def _cell_table(cells: list[dict[str, Any]]) -> list[str]:
    lines = ["| ratio | scenario | paper | mean | least to most | inside |", "| --- | --- | --- | --- | --- | --- |"]
    for cell in cells:
        low, high = cell["paper"]
        lines.append(
            f"| {cell['ratio'].replace('_', ' ')} | {cell['scenario']} | {low:.2f} to {high:.2f} | {cell['mean']:.2f} "
            f"| {cell['least']:.2f} to {cell['most']:.2f} | {'yes' if cell['inside'] else 'no'} |"
        )
    return lines


def _rest(outcome: Outcome, figures: Mapping[str, Any]) -> list[str]:
    knobs, lines = outcome.knobs, [""]
    if "expert_mean" in figures:
        lines += [
            f"Over verl-expert: {figures['expert_mean']:.2f} on average (to reach: {knobs.expert.mean:g}), at least "
            f"{figures['expert_least']:.2f} (to reach: {knobs.expert.least:g})."
        ]
    lines += [
        f"The simulator names the same winner in {figures['simulator_agrees']} of {figures['simulator_played']} "
        f"comparisons, plans within {knobs.simulator_indifferent:.0%} of each other not counted against it.",
        "",
        *_other_table(outcome),
        *_sensitivity(outcome),
        "How each was tuned:",
        "",
        *(f"- `{name}`: {text}." for name, text in TUNING.items() if any(name in own for own in knobs.rivals.values())),
    ]
    return lines


def _other_table(outcome: Outcome) -> list[str]:
    lines = ["| ratio | scenario | mean | least to most |", "| --- | --- | --- | --- |"]
    for name, kind in OTHERS.items():
        for scenario in scenarios(outcome):
            own = list(ratios(outcome, kind, scenario).values())
            if own:
                lines.append(f"| {name} | {scenario} | {mean(own):.2f} | {min(own):.2f} to {max(own):.2f} |")
    return [*lines, ""]


def _agreement(outcome: Outcome) -> tuple[int, int]:
    """Return in how many comparisons the simulator names the same winner as the model, and of how many."""
    agreeing = played = 0
    for kind in (*RATIOS.values(), *OTHERS.values()):
        for scenario in scenarios(outcome):
            model, play = (ratios(outcome, kind, scenario, seconds) for seconds in (predicted, simulated))
            for key in model.keys() & play.keys():
                close = abs(model[key] - 1) <= outcome.knobs.simulator_indifferent
                agreeing += close or (model[key] > 1) == (play[key] > 1)
                played += 1
    return agreeing, played


def _sensitivity(outcome: Outcome) -> list[str]:
    """Return the means of the cells under the other settings, beside those of the same models under the usual one."""
    settings = list(dict.fromkeys(case.setting for case, _ in outcome.made))
    if len(settings) < 2:
        return []
    columns = [f"{one.optimizer_steps} steps, {one.gradient_dtype}" for one in settings]
    lines = [
        f"Sensitivity, means of {', '.join(outcome.knobs.sample.models)} alone:",
        "",
        f"| ratio | scenario | {' | '.join(columns)} |",
        f"| --- | --- |{' --- |' * len(columns)}",
    ]
    for name, ranges in outcome.paper.items():
        for scenario in ranges:
            means = [_sample_mean(outcome, RATIOS[name], scenario, setting) for setting in settings]
            lines.append(f"| {name.replace('_', ' ')} | {scenario} | {' | '.join(means)} |")
    return [*lines, ""]


def _sample_mean(outcome: Outcome, kind: tuple[str, str, str], scenario: str, setting: Setting) -> str:
    found = ratios(outcome, kind, scenario, setting=setting)
    own = [value for (model, _), value in found.items() if model in outcome.knobs.sample.models]
    return f"{mean(own):.2f}" if own else "none"
