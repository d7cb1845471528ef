"""The second half of the page of the bench `paper`: what the simulator plays, other rivals, one type of GPUs alone."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from _paper_cases import Setting
from _paper_figures import (
    EXPERT,
    OTHERS,
    PLAYED,
    PREDICTED,
    RATIOS,
    Outcome,
    Range,
    agreement,
    alone,
    apart,
    astray,
    lost,
    missing,
    pairs,
    ratios,
    slow,
)
from _paper_plans import label
from _paper_words import listed, of_sample, sampled, span, table, verdict, words

from hetrl.search.baselines import TUNING


def second_half(outcome: Outcome, alone_range: Range) -> Iterator[str]:
    """Yield the lines of this half; `alone_range` is the paper's of all GPUs over those of one type."""
    yield from _lists(outcome)
    yield from _own_plans(outcome)
    yield from _others(outcome)
    yield from _alone(outcome, alone_range)
    yield from _sensitivity(outcome)
    yield from _tuning(outcome)


def _lists(outcome: Outcome) -> Iterator[str]:
    """Yield what the simulator and other seeds say against the planner's plans."""
    knobs, (agreeing, compared) = outcome.knobs, agreement(outcome)
    yield (
        f"The simulator names the same winner in {agreeing} of {compared} comparisons, plans within "
        f"{knobs.simulator_indifferent:.0%} of each other not counted against it."
    )
    yield ""
    told = {
        f"Plans of `{knobs.planner}` that play more than {knobs.simulator_indifferent:.0%} slower than predicted": (
            f"{label(made.asked)} ({made.slowness - 1:+.0%})" for made in slow(outcome)
        ),
        "Plans that lose to a rival's when both are played": (
            f"{label(own.asked)} ({own.played_seconds:.1f} s) to {label(theirs.asked)} ({theirs.played_seconds:.1f} s)"
            for own, theirs in lost(outcome)
        ),
        f"Rivals' plans that play more than {knobs.simulator_indifferent:.0%} slower or faster than predicted": (
            f"{label(made.asked)} ({made.slowness - 1:+.0%})" for made in astray(outcome)
        ),
        "Without a plan, and so not in the means": (label(made.asked) for made in missing(outcome)),
        f"Searches whose worst seed is more than {knobs.simulator_indifferent:.0%} slower than the best": (
            f"{label(made.asked)} ({span(made.seeds)} s)" for made in apart(outcome)
        ),
    }
    yield from (f"- {what}: {listed(entries)}." for what, entries in told.items())
    yield ""


def _own_plans(outcome: Outcome) -> Iterator[str]:
    knobs = outcome.knobs
    yield from table(f"plan of {knobs.planner}", "scenario", "predicted, s", "played, s", "played / predicted")
    for made in outcome.made.values():
        case = made.asked.case
        if made.asked.solver == knobs.planner and case.setting == knobs.setting and made.predicted_seconds:
            named = " ".join(filter(None, (case.model, case.algorithm, case.mode, case.gpu)))
            seconds = f"{made.predicted_seconds:.1f} | {made.played_seconds:.1f}"
            yield f"| {named} | {case.scenario} | {seconds} | {made.slowness:.3f} |"
    yield ""


def _others(outcome: Outcome) -> Iterator[str]:
    plans = [pair for scenario in outcome.scenarios for pair in pairs(outcome, OTHERS[EXPERT], scenario)]
    if plans:
        wanted, found = outcome.knobs.expert, ratios(plans)
        means = ", ".join(f"{how} {mean(own):.2f} on average, at least {min(own):.2f}" for how, own in found.items())
        yield f"Over verl-expert: {means} (to reach, played: {wanted.mean:g} and {wanted.least:g})."
        yield ""
    yield from table("ratio", "scenario", "predicted", "least to most", "played", "least to most")
    for name, kind in OTHERS.items():
        for scenario in outcome.scenarios:
            found = ratios(pairs(outcome, kind, scenario))
            if found[PREDICTED]:
                shown = " | ".join(f"{mean(own):.2f} | {span(own)}" for own in found.values())
                yield f"| {words(name)} | {scenario} | {shown} |"
    yield ""


def _alone(outcome: Outcome, bounds: Range) -> Iterator[str]:
    found, knobs = alone(outcome), outcome.knobs
    if not found:
        return
    yield (
        f"All 64 GPUs over the 24 A100 alone, {knobs.alone.scenario}, {knobs.alone.model}: the paper has "
        f"{bounds[0]:.2f} to {bounds[1]:.2f}; what plans on the 24, and in which mode, our notes of it do not say."
    )
    yield ""
    yield from table(f"{knobs.planner} on 64 GPUs", "on 24 A100", "predicted", "played")
    for one in found:
        values = (mean(one.ours[how]) for how in (PREDICTED, PLAYED))
        shown = " | ".join(f"{value:.2f} {verdict(value, bounds, knobs.widened_by)}" for value in values)
        yield f"| {one.mode} | {one.over}, {one.over_mode} | {shown} |"
    yield ""


def _sensitivity(outcome: Outcome) -> Iterator[str]:
    """Yield the means of the cells under the other settings, beside those of the same models under the usual one."""
    settings = list(dict.fromkeys(asked.case.setting for asked in outcome.made))
    if len(settings) < 2:
        return
    columns = [f"{one.optimizer_steps} steps, {one.gradient_dtype}" for one in settings]
    yield f"Sensitivity, predicted means of {sampled(outcome)} alone:"
    yield ""
    yield from table("ratio", "scenario", *columns)
    for name, ranges in outcome.paper.items():
        for scenario in ranges:
            means = [_sample_mean(outcome, name, scenario, setting) for setting in settings]
            yield f"| {words(name)} | {scenario} | {' | '.join(means)} |"
    yield ""


def _sample_mean(outcome: Outcome, ratio: str, scenario: str, setting: Setting) -> str:
    plans = pairs(outcome, RATIOS[ratio], scenario, setting=setting)
    own = ratios([pair for pair in plans if of_sample(pair[0], outcome)])[PREDICTED]
    return f"{mean(own):.2f}" if own else "none"


def _tuning(outcome: Outcome) -> Iterator[str]:
    rivals = {name for own in outcome.knobs.rivals.values() for name in own}
    yield "How each was tuned:"
    yield ""
    yield from (f"- `{name}`: {text}." for name, text in TUNING.items() if name in rivals)
