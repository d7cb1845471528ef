"""Estimators of a KL divergence from the log-probs of one sample; the same formulas for numpy arrays and tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetrl.errors import HetrlError

if TYPE_CHECKING:
    import torch

Values = TypeVar("Values", NDArray[np.float64], "torch.Tensor")

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(name: str, distance: Values, exp: Callable[[Any], Values]) -> Values:
    """Estimate KL(policy || reference) at each token from d = log p(reference) - log p(policy), drawn by the policy.

    k1 = -d: unbiased, of either sign, high variance. Its gradient is zero in expectation, so that as a term of the
    loss it only adds noise: it is for the reward.
    k2 = d^2 / 2: biased, never negative; its gradient is, in expectation, that of the KL (arXiv 2510.01555).
    k3 = exp(d) - d - 1: unbiased, never negative; the term of GRPO (arXiv 2402.03300, equation 4).
    Source of all three: Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). `exp` is the
    exponential of the kind of `distance`. Raises HetrlError for another name.
    """
    match name:
        case "k1":
            return -distance
        case "k2":
            return distance * distance / 2
        case "k3":
            return exp(distance) - distance - 1.0
    raise HetrlError(f'KL estimator "{name}" is not known; known: {", ".join(ESTIMATORS)}')
