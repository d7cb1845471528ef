"""Importance weights between the policy that drew a token and the one that training starts from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrl.errors import HetrlError

BOUNDS = ("none", "truncate", "mask")
LARGEST_EXPONENT = 20.0  # exp(20) = 4.9e8: finite in float32 after every product of the loss; verl takes the same


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
                  Brings You Off-Policy RL Training", fengyao.notion.site/off-policy-rl); cap 2 is verl's and TRL's
        mask      w where bounds[0] <= w <= bounds[1], else 0: IcePop (arXiv 2510.18855), whose bounds are 0.5 and 5
    Without staleness `behaviour` and `proximal` are one policy in two engines, and w measures their mismatch.
    """
    ratio = bounded_exp(proximal.astype(np.float64) - behaviour)
    if bound == "none":
        weights, cut = ratio, np.zeros_like(mask)
    elif bound == "truncate":
        weights, cut = np.minimum(ratio, cap), ratio > cap
    elif bound == "mask":
        cut = (ratio < bounds[0]) | (ratio > bounds[1])
        weights = np.where(cut, 0.0, ratio)
    else:
        raise HetrlError(f'importance weights: bound "{bound}" is not known; known: {", ".join(BOUNDS)}')
    return np.where(mask, weights, 0.0).astype(np.float32), float(cut[mask].mean())


def bounded_exp(exponent: NDArray[Any]) -> NDArray[Any]:
    """Return exp with its exponent held within +-LARGEST_EXPONENT."""
    result: NDArray[Any] = np.exp(np.clip(exponent, -LARGEST_EXPONENT, LARGEST_EXPONENT))
    return result
