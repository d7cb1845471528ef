"""Least squares of logarithms, with priors: positive parameters whose predictions come near what was measured.

    minimise  sum over points of log(predicted / measured)^2 + sum over parameters of (0.1 log10(p / prior))^2

Every parameter is fitted in its logarithm by Gauss-Newton steps with halving. The priors are wide (ten times its prior
costs a parameter as much as a point that is off by 10 %): they keep what the points hardly tell at a physical value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy

PRIOR_WEIGHT = 0.1 / math.log(10)  # a parameter ten times its prior counts as much as a point that is off by 10 %
_STEP = 1e-4  # of the finite differences
_ROUNDS = 40
Key = TypeVar("Key")


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
