"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6


def group_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (r - mean of the group) / (standard deviation of the group + eps) for rewards [groups, samples].

    Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the population standard deviation. A group with
    equal rewards, or with a single sample, has advantages of zero: it says nothing about which sample is better.
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    scaled: NDArray[np.float64] = centred / (rewards.std(axis=1, keepdims=True) + EPSILON)
    return scaled
