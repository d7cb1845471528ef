"""What the bench `paper` counts: ratios, cells inside the paper's ranges, lists of plans that play badly, trends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from _paper_cases import ASYNC, DEFINED, SYNC, Asked, Knobs, Setting, rival
from _paper_plans import Made

from hetrl.search.baselines.definition import AS_SOLVED, Definition


@dataclass(frozen=True)
class Kind:
    """A ratio: the seconds of a rival in its mode over those of the planner in its own."""

    rival: str
    rival_mode: str
    own_mode: str


# The ratios of the paper, and what else is compared.
RATIOS = {
    "sync_over_verl": Kind("verl", SYNC, SYNC),
    "async_over_streamrl": Kind("streamrl", ASYNC, ASYNC),
    "async_over_verl": Kind("verl", SYNC, ASYNC),
}
EXPERT = "sync_over_verl-expert"
OTHERS = {EXPERT: Kind("verl-expert", SYNC, SYNC), "async_over_areal-hex": Kind("areal-hex", ASYNC, ASYNC)}
Range = tuple[float, float]
PREDICTED, PLAYED = "predicted", "played"  # by the cost model, by the simulator
Pairs = Sequence[tuple[Made, Made]]  # the planner's plan and the rival's


@dataclass(frozen=True)
class Outcome:
    """All plans of a run; `paper` has the paper's range of each ratio and scenario."""

    knobs: Knobs
    paper: Mapping[str, Mapping[str, Range]]
    made: Mapping[Asked, Made]
    full: bool

    @property
    def scenarios(self) -> list[str]:
        """Return the scenarios that were run."""
        return list(dict.fromkeys(asked.case.scenario for asked in self.made))


def definitions(outcome: Outcome) -> dict[str, Definition]:
    """Return the definitions by name; one with which all rivals plan as with one before it is left out."""
    cases = dict.fromkeys(asked.case for asked in outcome.made)
    found: dict[tuple[Asked, ...], tuple[str, Definition]] = {}
    for name, definition in outcome.knobs.definitions.items():
        plans = tuple(rival(system, definition, case) for case in cases for system in DEFINED)
        found.setdefault(plans, (name, definition))
    return dict(found.values())


def pairs(
    outcome: Outcome,
    kind: Kind,
    scenario: str,
    definition: Definition = AS_SOLVED,
    setting: Setting | None = None,
) -> Pairs:
    """Return the planner's and the rival's plan for each model and algorithm; where one has none it is left out."""
    found = []
    for asked, own in outcome.made.items():
        case = asked.case
        if (asked.solver, case.mode, case.scenario) != (outcome.knobs.planner, kind.own_mode, scenario):
            continue
        if case.gpu or case.setting != (setting or outcome.knobs.setting):
            continue
        theirs = outcome.made.get(rival(kind.rival, definition, replace(case, mode=kind.rival_mode)))
        if theirs and own.predicted_seconds and theirs.predicted_seconds:
            found.append((own, theirs))
    return found


def ratios(plans: Pairs) -> dict[str, tuple[float, ...]]:
    """Return the rival's seconds over the planner's, predicted and played."""
    return {
        PREDICTED: tuple(_over(theirs.predicted_seconds, own.predicted_seconds) for own, theirs in plans),
        PLAYED: tuple(_over(theirs.played_seconds, own.played_seconds) for own, theirs in plans),
    }


def _over(theirs: float | None, own: float | None) -> float:
    assert theirs is not None and own is not None  # pairs are of plans that were found
    return theirs / own


def inside(value: float, bounds: Range, widened_by: float = 0.0) -> bool:
    """Return whether a value lies in a range, ends included, widened by a share at both ends."""
    low, high = bounds
    return low * (1 - widened_by) <= value <= high * (1 + widened_by)


@dataclass(frozen=True)
class Cell:
    """A ratio and scenario of the paper, and ours: predicted and played, over models and algorithms."""

    ratio: str
    scenario: str
    paper: Range
    ours: Mapping[str, tuple[float, ...]]


def cells(outcome: Outcome, definition: Definition = AS_SOLVED) -> list[Cell]:
    """Return the cells of the paper that were run, with the rivals under a definition."""
    found = []
    for name, ranges in outcome.paper.items():
        for scenario, bounds in ranges.items():
            plans = pairs(outcome, RATIOS[name], scenario, definition)
            if plans:
                found.append(Cell(name, scenario, bounds, ratios(plans)))
    return found


def with_worst_seeds(outcome: Outcome) -> Outcome:
    """Return the outcome with each of the planner's predictions as its worst seed has it."""
    made = {
        asked: replace(one, predicted_seconds=max(one.seeds)) if one.seeds else one
        for asked, one in outcome.made.items()
    }
    return replace(outcome, made=made)


def count(some: Sequence[Cell], how: str, widened_by: float = 0.0) -> int:
    """Return in how many cells the mean, predicted or played, lies in the paper's range, widened by a share."""
    return sum(inside(mean(cell.ours[how]), cell.paper, widened_by) for cell in some)


def missing(outcome: Outcome) -> list[Made]:
    """Return what was asked for and has no plan: the means of its cells are over the other models."""
    return [made for made in outcome.made.values() if made.predicted_seconds is None]


def slow(outcome: Outcome) -> list[Made]:
    """Return the planner's plans that play slower than predicted by more than the simulator is indifferent to."""
    limit, planner = 1 + outcome.knobs.simulator_indifferent, outcome.knobs.planner
    planned = [made for made in outcome.made.values() if made.asked.solver == planner and made.predicted_seconds]
    return [made for made in planned if made.slowness > limit]


def astray(outcome: Outcome) -> list[Made]:
    """Return the rivals' plans that the simulator plays faster or slower than predicted, by more than that."""
    close, rivals = outcome.knobs.simulator_indifferent, set()
    for _, theirs in comparisons(outcome):
        if abs(theirs.slowness - 1) > close:
            rivals.add(theirs.asked)
    return [made for asked, made in outcome.made.items() if asked in rivals]


def apart(outcome: Outcome) -> list[Made]:
    """Return the planner's plans of which another seed's is slower by more than the simulator is indifferent to."""
    limit = 1 + outcome.knobs.simulator_indifferent
    return [made for made in outcome.made.values() if made.seeds and max(made.seeds) > limit * min(made.seeds)]


def comparisons(outcome: Outcome) -> Iterator[tuple[Made, Made]]:
    """Yield every plan of the planner with every rival's that it is compared with, each pair once."""
    seen = set()
    for kind in (*RATIOS.values(), *OTHERS.values()):
        for scenario in outcome.scenarios:
            for definition in definitions(outcome).values():
                for own, theirs in pairs(outcome, kind, scenario, definition):
                    if (own.asked, theirs.asked) not in seen:
                        seen.add((own.asked, theirs.asked))
                        yield own, theirs


def lost(outcome: Outcome) -> list[tuple[Made, Made]]:
    """Return the comparisons that the planner's plan loses when both are played."""
    return [pair for pair in comparisons(outcome) if ratios([pair])[PLAYED][0] < 1]


def agreement(outcome: Outcome) -> tuple[int, int]:
    """Return in how many comparisons model and simulator name the same winner, and of how many; close ones agree."""
    compared, close = ratios(list(comparisons(outcome))), outcome.knobs.simulator_indifferent
    both = list(zip(compared[PREDICTED], compared[PLAYED], strict=True))
    return sum(abs(model - 1) <= close or (model > 1) == (play > 1) for model, play in both), len(both)


@dataclass(frozen=True)
class Alone:
    """All GPUs in a mode over the plan of a solver on those of one type."""

    mode: str
    over: str
    over_mode: str
    ours: Mapping[str, tuple[float, ...]]


def alone(outcome: Outcome) -> list[Alone]:
    """Return the ratios of all GPUs over those of one type: each mode over its own, and async over the sync rivals."""
    knobs, found = outcome.knobs, []
    for mode, over_mode in ((SYNC, SYNC), (ASYNC, ASYNC), (ASYNC, SYNC)):
        planner = [knobs.planner] if mode == over_mode else []
        for solver in (*planner, *knobs.alone.rivals[over_mode]):
            plans = list(_alone_pairs(outcome, solver, mode, over_mode))
            if plans:
                found.append(Alone(mode, solver, over_mode, ratios(plans)))
    return found


def _alone_pairs(outcome: Outcome, solver: str, mode: str, over_mode: str) -> Iterator[tuple[Made, Made]]:
    for asked, theirs in outcome.made.items():
        case = asked.case
        if case.gpu and (asked.solver, case.mode) == (solver, over_mode) and theirs.predicted_seconds:
            own = outcome.made.get(Asked(replace(case, gpu="", mode=mode), outcome.knobs.planner))
            if own and own.predicted_seconds:
                yield own, theirs


@dataclass(frozen=True)
class Trend:
    """How a ratio changes from one cell (`to`) to another (`of`), each the name of a ratio and a scenario, and why."""

    of: tuple[str, str]
    to: tuple[str, str]
    reason: str


def change(trend: Trend, some: Sequence[Cell]) -> tuple[float, float] | None:
    """Return the factor between the middles of the paper's ranges, and between our predicted means; None: not run."""
    known = {(cell.ratio, cell.scenario): (mean(cell.paper), mean(cell.ours[PREDICTED])) for cell in some}
    if not {trend.of, trend.to} <= known.keys():
        return None
    return known[trend.of][0] / known[trend.to][0], known[trend.of][1] / known[trend.to][1]
