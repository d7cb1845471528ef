"""How far two policies are apart, from the log-probs of what one of them drew: KL estimates, importance weights."""

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
BOUNDS = ("none", "truncate", "mask")
LARGEST_EXPONENT = 20.0  # exp(20) = 4.9e8: finite in float32 after every product of the loss; verl takes the same


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


def importance_weights(
    proximal: NDArray[Any],
    behaviour: NDArray[Any],
    mask: NDArray[np.bool_],
    *,
    bound: str = "none",
    cap: float = 2.0,
    bounds: tuple[float, float] = (0.5, 5.0),
) -> tuple[NDArray[np.float32], float]:
    """Return w = exp(proximal - behaviour) of each masked token, bounded, and the fraction of tokens that were cut.

    Log-probs and weights are [n, s]; weights are 0 outside the mask, and constants to the loss. With `bound`
        none      w: the decoupled objective, pi_prox / pi_behav (AReaL, arXiv 2505.24298, section 5.2, after Hilton
                  et al., arXiv 2110.00641)
        truncate  min(w, cap): truncated importance sampling, TIS (Yao et al., "Your Efficient RL Framework Secretly
                  Brings You Off-Policy RL Training", fengyao.notion.site/off-policy-rl); cap 2 is verl's
        mask      w where bounds[0] <= w <= bounds[1], else 0: IcePop (arXiv 2510.18855), whose bounds are 0.5 and 5
    Without staleness `behaviour` and `proximal` are one policy in two engines, and w measures their mismatch.
    """
    ratio: NDArray[np.float64] = bounded_exp(proximal.astype(np.float64) - behaviour)
    weights, cut = bounded_weights(ratio, bound, cap, bounds)
    return np.where(mask, weights, 0.0).astype(np.float32), float(cut[mask].mean())


def bounded_weights(ratio: Values, bound: str, cap: float, bounds: tuple[float, float]) -> tuple[Values, Any]:
    """Return the finite ratios as `bound` leaves them (see `importance_weights`), and the mask of those that it cut."""
    if bound == "none":
        return ratio, ratio < 0  # none
    if bound == "truncate":
        cut = ratio > cap
        return ratio * ~cut + cap * cut, cut
    if bound == "mask":
        cut = (ratio < bounds[0]) | (ratio > bounds[1])
        return ratio * ~cut, cut
    raise HetrlError(f'importance weights: bound "{bound}" is not known; known: {", ".join(BOUNDS)}')


def bounded_exp(exponent: NDArray[Any]) -> NDArray[Any]:
    """Return exp with its exponent held within +-LARGEST_EXPONENT."""
    result: NDArray[Any] = np.exp(np.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT))
    return result
