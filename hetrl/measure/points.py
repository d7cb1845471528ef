"""The measurements that the efficiencies are fitted to, each with what a question to the cost model says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from hetrl.cost.efficiency import OURS, PLANNED_ENGINE, Efficiencies
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
ANSWERS: Mapping[str, Callable[..., Answer]] = {  # kind of point -> what answers it, of the model and the GPU
    "generation": generation,
    "decode-layer": decode_layer,
    "prefill-layer": prefill_layer,
    "inference": inference,
}
KINDS = (*ANSWERS, "training")
TRAINERS = ("training", "inference")  # kinds that a trainer does, the others a rollout engine


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
    def of_trainer(self) -> bool:
        """Return whether a trainer did it, not a rollout engine."""
        return self.kind in TRAINERS

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
    """Return the measurements of a file, or those of the catalogue.

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
        answer = ANSWERS[point.kind](model, gpu, efficiencies=numbers, **asked)
    if point.measure in TIMES:
        return answer.seconds * TIMES[point.measure]
    return float(answer.to_json()[point.measure])


def residuals(points: Sequence[Point], numbers: Efficiencies) -> list[Residual]:
    """Return the points with their predictions under the fitted numbers."""
    return [Residual(point, predicted(point, numbers)) for point in points]
