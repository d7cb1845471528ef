"""Fit the efficiencies of the cost model to measurements.

over all published serving points: shares of decode and prefill of each GPU type, seconds per decode step of each
                         engine release and per all-reduce between tensor-parallel ranks
over all published training points: the share of each type, the rate of each trainer and of attention, traffic of
                         activations, exposed communication
then over the points of hetrl's own engines: what they make of the GPUs, whose shares stay

Each by the least squares of `hetrl.measure.least_squares`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, replace

import yaml

from hetrl.cost.efficiency import OURS, PLANNED_ENGINE, REFERENCE, Efficiencies, Engine, Trainer
from hetrl.gpus import PHASES
from hetrl.measure.least_squares import fit_ratios
from hetrl.measure.points import Point, Residual, predicted

PRIOR = {
    "decode": 0.8,
    "prefill": 0.75,
    "training": 0.6,
    "step": 0.002,
    "sequence": 1e-5,
    "prompts": 1.0,
    "all_reduce": 2e-5,
    "trainer": 1.0,
    "layer": 1e-4,
    "attention": 0.6,
    "activation_traffic": 1.0,
    "exposed": 0.2,
}
_ALONE = (
    ("step", PLANNED_ENGINE),
    *((name, "") for name in ("all_reduce", "attention", "activation_traffic", "exposed")),
)
Parameters = dict[tuple[str, str], float]  # (kind, GPU type, engine release, trainer or nothing) -> value


def fit(points: Sequence[Point], without: Point | None = None) -> Efficiencies:
    """Return the fitted numbers; types, phases and trainers without points have none.

    `without` leaves one of the points out: what the others say of it. A parameter that it alone tells of stays at its
    prior; a share is inferred then.
    """
    kept = [point for point in points if point != without]
    others = [key for key in _keys(points) if key[0] not in PHASES]
    found = _priors((*_keys(kept), *others, *_ALONE))
    published = [point for point in kept if not point.own]
    for group in (
        [point for point in published if not point.of_trainer],
        [point for point in published if point.of_trainer],
        [point for point in kept if point.own],
    ):
        if group:
            found.update(_least_squares(group, found))
    return _fitted(found, points)


def _keys(points: Sequence[Point]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that these points tell something of; a decode step tells little of products."""
    for point in points:
        if point.own:
            yield from _own_keys(point)
            continue
        if point.of_trainer:
            yield from (("training", point.gpu), ("attention", ""), ("activation_traffic", ""), ("exposed", ""))
        else:
            yield from (("decode", point.gpu), ("all_reduce", ""))
        if point.kind in ("generation", "prefill-layer"):
            yield "prefill", point.gpu
        if "engine" in point.question:
            yield "step", str(point.question["engine"])
        if point.question.get("trainer", REFERENCE) != REFERENCE:
            yield "trainer", str(point.question["trainer"])


def _own_keys(point: Point) -> tuple[tuple[str, str], ...]:
    if point.of_trainer:
        return ("trainer", OURS), ("layer", OURS)
    return ("step", PLANNED_ENGINE), ("sequence", PLANNED_ENGINE), ("prompts", PLANNED_ENGINE)


def _priors(keys: Iterable[tuple[str, str]]) -> Parameters:
    return {key: PRIOR[key[0]] for key in keys}


def _fitted(values: Parameters, points: Sequence[Point]) -> Efficiencies:
    """Return the numbers with these values of all parameters; a share that has none is inferred."""
    shares: dict[str, dict[str, float]] = {}
    for (kind, gpu), value in values.items():
        if kind in PHASES:
            shares.setdefault(gpu, {})[kind] = min(value, 1.0)
    return Efficiencies(
        shares=shares,
        engines={
            name: Engine(value, values.get(("sequence", name), 0.0), values.get(("prompts", name), 1.0))
            for (kind, name), value in values.items()
            if kind == "step"
        },
        engine_of={point.gpu: str(point.question["engine"]) for point in points if "engine" in point.question},
        decode_all_reduce=values["all_reduce", ""],
        trainers={
            name: Trainer(value, values.get(("layer", name), 0.0))
            for (kind, name), value in values.items()
            if kind == "trainer"
        },
        attention=values["attention", ""],
        activation_traffic=values["activation_traffic", ""],
        exposed=min(values["exposed", ""], 1.0),
    )


def _least_squares(points: Sequence[Point], beside: Parameters) -> Parameters:
    """Return the values of these points' parameters that minimise the squares; those `beside` stay."""

    def ratios(values: Parameters) -> list[float]:
        numbers = _fitted({**beside, **values}, points)
        return [predicted(point, numbers) / point.value for point in points]

    return fit_ratios(ratios, _priors(_keys(points)))


def document(numbers: Efficiencies, found: Sequence[Residual]) -> str:
    """Return the text of the fitted file: numbers (those of `rounded`), then each point with its residual."""
    engines = {
        name: {
            **asdict(one),
            "measured_on": sorted(g for g, e in numbers.engine_of.items() if e == name),
        }
        for name, one in sorted(numbers.engines.items())
    }
    body = {
        "shares": {gpu: dict(shares) for gpu, shares in sorted(numbers.shares.items())},
        "engines": engines,
        "decode_all_reduce_seconds": numbers.decode_all_reduce,
        "training": {
            "trainers": {name: asdict(one) for name, one in numbers.trainers.items()},
            "attention": numbers.attention,
            "activation_traffic": numbers.activation_traffic,
            "exposed_communication": numbers.exposed,
        },
        "residuals": [
            {
                "point": one.point.name,
                "unit": one.point.measure,
                "measured": one.point.value,
                "predicted": _rounded(one.predicted),
                "error": round(one.error, 3),
                "source": one.point.source,
            }
            for one in found
        ],
    }
    return _HEADER + yaml.safe_dump(body, sort_keys=False, width=120, default_flow_style=None)


_HEADER = """\
# Written by `hetrl calibrate` from calibration_points.yaml; do not edit. docs/cost-model.md explains each number.
# shares: of the memory bandwidth (decode) and of the matrix peak (prefill, training) that a type reaches.
# engines: seconds per decode step and per sequence in one; share of the rate of a layer that whole prompts reach.
# trainers: rates of products, relative to llm-foundry's; seconds of a layer's forward pass beside all that is counted.
"""


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def rounded(numbers: Efficiencies) -> Efficiencies:
    """Return the numbers as the file holds them, with four digits, so that its residuals are those of its numbers."""
    return replace(
        numbers,
        shares={gpu: {phase: _rounded(v) for phase, v in shares.items()} for gpu, shares in numbers.shares.items()},
        engines={name: Engine(*map(_rounded, astuple(one))) for name, one in numbers.engines.items()},
        decode_all_reduce=_rounded(numbers.decode_all_reduce),
        trainers={name: Trainer(*map(_rounded, astuple(one))) for name, one in numbers.trainers.items()},
        attention=_rounded(numbers.attention),
        activation_traffic=_rounded(numbers.activation_traffic),
        exposed=_rounded(numbers.exposed),
    )
