"""What follows from the measurements of one machine: shares per phase, delay and bandwidth of its all-reduce.

shares   decode and prefill together from the decode and prefill layers, then training from the training layers:
           minimise  sum over points of log(predicted / measured)^2 + the calibration's prior
exchange seconds = a + b bytes, the squares of the relative errors least, neither negative

Points with the use `fit` alone take part; those held out are predicted afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy

from hetrl.cost.compute import StageShape, decode_seconds, forward_flops, prefill_seconds, training_seconds
from hetrl.cost.efficiency import REFERENCE, Rates, calibrated
from hetrl.describe.measured import Check, Exchange, Measurement, Phase
from hetrl.measure.calibrate import PRIOR
from hetrl.measure.least_squares import fit_ratios
from hetrl.workload import architecture

LAYERS: Mapping[str, Phase] = {  # kind -> phase
    "decode layer": "decode",
    "prefill layer": "prefill",
    "training layer": "training",
}
BYTES_OF = {"bf16": 2, "fp32": 4}


def layer_seconds(layer: Measurement, rates: Rates) -> float:
    """Return what the cost model says of one layer measurement, on a GPU with these rates.

    Its question has `architecture`, `dtype`, `batch` and `context` (decode) or `sequence` (prefill and training, which
    is forward and backward without recomputation).
    """
    asked = layer.question
    shape = _one_layer(str(asked["architecture"]), str(asked["dtype"]), rates)
    batch = float(asked["batch"])
    if layer.kind == "decode layer":
        return decode_seconds(shape, batch, float(asked["context"]))
    sequence = float(asked["sequence"])
    if layer.kind == "prefill layer":
        return prefill_seconds(shape, batch * sequence, sequence)
    return sum(training_seconds(shape, batch * sequence, sequence, "none"))


def _one_layer(model: str, dtype: str, rates: Rates) -> StageShape:
    return StageShape(architecture(model), 1, False, False, True, 1, rates, BYTES_OF[dtype])


def layer_work(kind: str, model: str, dtype: str, batch: int, tokens: int) -> tuple[str, float]:
    """Return unit and amount of what one run of a layer does: bytes read in decode, else FLOPs (x 3 in training)."""
    shape = _one_layer(model, dtype, calibrated().rates("cpu"))
    if kind == "decode layer":
        return "bytes", shape.matrix_parameters * shape.weight_bytes + batch * tokens * shape.kv_bytes_per_token
    return "flops", batch * tokens * forward_flops(shape, tokens) * (3 if kind == "training layer" else 1)


def fit_shares(measurements: Iterable[Measurement], gpu: str) -> dict[Phase, float]:
    """Return the share of the data sheet in each phase that has points to fit, for a GPU type."""
    points = [one for one in measurements if one.use == "fit" and one.kind in LAYERS]
    phases = list(dict.fromkeys(LAYERS[one.kind] for one in points))
    if not phases:
        return {}

    def ratios(shares: Mapping[Phase, float]) -> list[float]:
        rates = measured_rates(gpu, shares)
        return [layer_seconds(point, rates) / point.median_seconds for point in points]

    return fit_ratios(ratios, {phase: PRIOR[phase] for phase in phases})


def measured_rates(gpu: str, shares: Mapping[Phase, float]) -> Rates:
    """Return the rates of a GPU type of which these shares were measured, for layers that are no trainer's."""
    return calibrated().with_measured({gpu: shares}).rates_under(gpu, REFERENCE)


def check_held_out(measurements: Iterable[Measurement], gpu: str, shares: Mapping[Phase, float]) -> tuple[Check, ...]:
    """Return the predictions, with these shares, of the layers that the fit did not see."""
    held_out = [one for one in measurements if one.use == "held out" and LAYERS.get(one.kind) in shares]
    rates = measured_rates(gpu, shares)
    return tuple(Check(one.name, one.median_seconds, layer_seconds(one, rates)) for one in held_out)


def fit_exchange(measurements: Iterable[Measurement]) -> Exchange | None:
    """Return delay and bandwidth of the all-reduces, None for fewer than two sizes.

    Those of `hetrl.cost.network.all_reduce_seconds`: 2 alpha + 2 (n-1)/n bytes / beta.
    """
    points = [one for one in measurements if one.kind == "all-reduce"]
    if len({one.question["bytes"] for one in points}) < 2:
        return None
    ranks = int(points[0].question["ranks"])
    fixed, per_byte = fit_line([(float(one.question["bytes"]), one.median_seconds) for one in points])
    gbps = 2 * (ranks - 1) / ranks * 8 / 1e9 / per_byte
    return Exchange(str(points[0].question["backend"]), ranks, fixed / 2 * 1e3, gbps)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return a >= 0 and b > 0 of y = a + b x that minimise the sum of ((a + b x) / y - 1)^2 over points (x, y).

    Relative errors, so that small transfers say as much as large ones. Where the best b is not positive, nothing but
    the largest transfer is left to tell it: b = y / x there.
    """
    x, y = (numpy.array(values) for values in zip(*points, strict=True))
    rows = numpy.stack([1 / y, x / y], axis=1)
    (fixed, slope), *_ = numpy.linalg.lstsq(rows, numpy.ones(len(y)), rcond=None)
    if slope <= 0:
        largest = int(numpy.argmax(x))
        return 0.0, float(y[largest] / x[largest])
    if fixed < 0:  # through the origin: one unknown left
        return 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return float(fixed), float(slope)
