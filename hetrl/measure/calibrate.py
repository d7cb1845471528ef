"""Fit the efficiencies of the cost model to published measurements.

over all published serving points: shares of decode and prefill of each GPU type, seconds per decode step of each
                         engine release and per all-reduce between tensor-parallel ranks
over all published training points: the share of each type, the rate of each trainer and of attention, traffic of
                         activations, exposed communication
then over the points of hetrl's own engines: what they make of the GPUs, whose shares stay
    minimise  sum over points of log(predicted / measured)^2 + sum over parameters of (0.1 log10(p / prior))^2

Every parameter is positive and fitted in its logarithm by Gauss-Newton steps with halving. The priors are wide (ten
times its prior costs a parameter as much as a point that is off by 10 %): they keep what the points hardly tell at a
physical value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy
import yaml

from hetrl.cost.efficiency import OURS, PLANNED_ENGINE, REFERENCE, Efficiencies, Engine, Trainer
from hetrl.describe.yaml_file import read_mapping
from hetrl.errors import UsageError, unknown
from hetrl.questions.answer import Answer
from hetrl.questions.serving import decode_layer, generation, inference, prefill_layer
from hetrl.questions.step import SoloTraining
from hetrl.questions.training import training
from hetrl.workload import architecture

POINTS = "calibration_points.yaml"
TIMES = {"seconds_per_step": 1.0, "milliseconds": 1e3}  # measure of an answer's time -> its units in a second
MEASURES = ("tokens_per_second", "tokens_per_second_per_gpu", *TIMES)
SERVING: Mapping[str, Callable[..., Answer]] = {  # kind of point -> what answers it
    "generation": generation,
    "decode-layer": decode_layer,
    "prefill-layer": prefill_layer,
}
KINDS = (*SERVING, "training", "inference")
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
SHARES = ("decode", "prefill", "training")
_ALONE = (
    ("step", PLANNED_ENGINE),
    *((name, "") for name in ("all_reduce", "attention", "activation_traffic", "exposed")),
)
PRIOR_WEIGHT = 0.1 / math.log(10)  # a parameter ten times its prior counts as much as a point that is off by 10 %
_STEP = 1e-4  # of the finite differences
_ROUNDS = 40
Key = TypeVar("Key")
Parameters = dict[tuple[str, str], float]  # (kind, GPU type, engine release, trainer or nothing) -> value


@dataclass(frozen=True)
class Point:
    """One measurement: the question that it answers and the measured value."""

    kind: str
    question: Mapping[str, Any]
    measure: str
    value: float
    source: str

    @property
    def gpu(self) -> str:
        """Return the GPU type."""
        return str(self.question["gpu"])

    @property
    def own(self) -> bool:
        """Return whether hetrl's engines did it: they tell of themselves, not of the GPU."""
        asked = self.question
        return asked.get("engine") == PLANNED_ENGINE or self.kind == "inference" or asked.get("trainer") == OURS

    @property
    def name(self) -> str:
        """Return the question in one line."""
        rest = {key: value for key, value in self.question.items() if key not in ("gpu", "architecture")}
        words = ", ".join(f"{key} {value}" for key, value in rest.items())
        return f"{self.kind} {self.gpu} {self.question['architecture']} ({words})"


@dataclass(frozen=True)
class Residual:
    """A point and what the fitted model says of it, in the point's unit."""

    point: Point
    predicted: float

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.point.value - 1


def read_points(path: Path | None = None) -> list[Point]:
    """Return the measurements of a file, or the published ones of the catalogue.

    Raises UsageError where the file is not of their form.
    """
    place = path or resources.files("hetrl.catalogue").joinpath(POINTS)
    expected = f"kinds with lists of measurements, as hetrl/catalogue/{POINTS} has them"
    return points_of(read_mapping(place, expected))


def points_of(document: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Point]:
    """Return the points of a parsed file: an entry with lists is one point per place in the lists."""
    points = []
    for kind, entries in document.items():
        if kind not in KINDS:
            raise UsageError(f"calibration points: {unknown('kind', kind, KINDS)}")
        for entry in entries:
            lengths = {len(value) for value in entry.values() if isinstance(value, list)}
            if len(lengths) > 1:
                raise UsageError(f"calibration points, {kind}: the lists of {dict(entry)} differ in length")
            points += [_point(kind, entry, index) for index in range(max(lengths, default=1))]
    return points


def _point(kind: str, entry: Mapping[str, Any], index: int) -> Point:
    one = {key: value[index] if isinstance(value, list) else value for key, value in entry.items()}
    measures = [key for key in MEASURES if key in one]
    if len(measures) != 1 or not {"gpu", "architecture", "source"} <= one.keys():
        needs = f"gpu, architecture, source and one of {', '.join(MEASURES)}"
        raise UsageError(f"calibration points, {kind}: {dict(entry)} needs {needs}")
    value, source = float(one.pop(measures[0])), str(one.pop("source"))
    return Point(kind, one, measures[0], value, source)


def predicted(point: Point, numbers: Efficiencies) -> float:
    """Return what these fitted numbers say of a point, in the point's unit."""
    asked = dict(point.question)
    model, gpu = architecture(asked.pop("architecture")), asked.pop("gpu")
    model = replace(model, layers=asked.pop("layers", model.layers))
    if point.kind == "training":
        answer = training(SoloTraining(architecture=model, gpu=gpu, efficiencies=numbers, **asked))
    else:
        answer = {**SERVING, "inference": inference}[point.kind](model, gpu, efficiencies=numbers, **asked)
    if point.measure in TIMES:
        return answer.seconds * TIMES[point.measure]
    return float(answer.to_json()[point.measure])


def fit(points: Sequence[Point], without: Point | None = None) -> Efficiencies:
    """Return the fitted numbers; types, phases and trainers without points have none.

    `without` leaves one of the points out: what the others say of it. A parameter that it alone tells of stays at its
    prior; a share is inferred then.
    """
    kept = [point for point in points if point != without]
    others = [key for key in _keys(points) if key[0] not in SHARES]
    found = _priors((*_keys(kept), *others, *_ALONE))
    published = [point for point in kept if not point.own]
    for group in (
        [point for point in published if point.kind in SERVING],
        [point for point in published if point.kind not in SERVING],
        [point for point in kept if point.own],
    ):
        if group:
            found.update(_least_squares(group, found))
    return _fitted(found, points)


def residuals(points: Sequence[Point], numbers: Efficiencies) -> list[Residual]:
    """Return the points with their predictions under the fitted numbers."""
    return [Residual(point, predicted(point, numbers)) for point in points]


def _keys(points: Sequence[Point]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that these points tell something of; a decode step tells little of products."""
    for point in points:
        if point.own:
            yield from _own_keys(point)
            continue
        if point.kind == "training":
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
    if point.kind in SERVING:
        return ("step", PLANNED_ENGINE), ("sequence", PLANNED_ENGINE), ("prompts", PLANNED_ENGINE)
    return ("trainer", OURS), ("layer", OURS)


def _priors(keys: Iterable[tuple[str, str]]) -> Parameters:
    return {key: PRIOR[key[0]] for key in keys}


def _fitted(values: Parameters, points: Sequence[Point]) -> Efficiencies:
    """Return the numbers with these values of all parameters; a share that has none is inferred."""
    shares: dict[str, dict[str, float]] = {}
    for (kind, gpu), value in values.items():
        if kind in SHARES:
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


def fit_ratios(ratios: Callable[[dict[Key, float]], Sequence[float]], priors: Mapping[Key, float]) -> dict[Key, float]:
    """Return the values with the least squares of the logarithms of `ratios` (predicted / measured) and the priors'."""
    prior = numpy.log([*priors.values()])

    def values(logs: numpy.ndarray) -> dict[Key, float]:
        return dict(zip(priors, numpy.exp(logs).tolist(), strict=True))

    def errors(logs: numpy.ndarray) -> numpy.ndarray:
        off = [math.log(ratio) for ratio in ratios(values(logs))]
        return numpy.array([*off, *((logs - prior) * PRIOR_WEIGHT)])

    return values(minimise(errors, prior))


def minimise(errors: Callable[[numpy.ndarray], numpy.ndarray], start: numpy.ndarray) -> numpy.ndarray:
    """Return where the sum of squared errors is least, from `start`: Gauss-Newton steps with halving."""
    at = start.copy()
    current = errors(at)
    for _ in range(_ROUNDS):
        columns = [(errors(at + _STEP * unit) - current) / _STEP for unit in numpy.eye(len(at))]
        direction = numpy.linalg.lstsq(numpy.stack(columns, axis=1), -current, rcond=None)[0]
        direction *= min(1.0, 0.7 / max(float(abs(direction).max()), 1e-12))  # in logarithms at most a factor of two
        scale = 1.0
        while scale > 1e-3 and (following := errors(at + scale * direction)) @ following >= current @ current:
            scale /= 2
        if scale <= 1e-3:
            break
        at, current = at + scale * direction, following
    return at


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
        engines={
            name: Engine(_rounded(one.step_seconds), _rounded(one.sequence_seconds), _rounded(one.prefill))
            for name, one in numbers.engines.items()
        },
        decode_all_reduce=_rounded(numbers.decode_all_reduce),
        trainers={
            name: Trainer(_rounded(one.products), _rounded(one.layer_seconds)) for name, one in numbers.trainers.items()
        },
        attention=_rounded(numbers.attention),
        activation_traffic=_rounded(numbers.activation_traffic),
        exposed=_rounded(numbers.exposed),
    )
