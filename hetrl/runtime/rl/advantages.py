"""Advantages: relative to a group of samples (GRPO), and from a value model (PPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """One advantage per sample, group after group, float64, and how many groups say nothing.

    `equal` counts groups of two or more samples whose rewards are all the same, `single` groups of one sample.
    """

    values: NDArray[np.float64]
    equal: int
    single: int


def group_advantages(
    rewards: Sequence[Sequence[float]], std: str = "unbiased", epsilon: float = EPSILON
) -> GroupAdvantages:
    """Return the advantage of each sample against the other samples of its prompt; groups may differ in size.

    With `std` "unbiased": (r - mean) / (sigma + epsilon), sigma^2 = sum (r - mean)^2 / (G - 1) over the group's G
    samples. Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2, which leaves the kind of deviation open;
    verl and TRL take the unbiased one (torch.std), verl this epsilon.
    With `std` "none": r - mean. Source: Dr. GRPO (arXiv 2503.20783), section 3.1: the deviation gives more weight to
    prompts that are nearly always or nearly never answered.
    A group with equal rewards, or with one sample, has advantages of exactly zero: it does not say which is better.
    """
    parts: list[NDArray[np.float64]] = []
    equal = single = 0
    for group in rewards:
        values = np.asarray(group, dtype=np.float64)
        if len(values) < 2 or (values == values[0]).all():
            single, equal = single + (len(values) < 2), equal + (len(values) >= 2)
            parts.append(np.zeros_like(values))
            continue
        centred = values - values.mean()
        parts.append(centred if std == "none" else centred / (values.std(ddof=1) + epsilon))
    return GroupAdvantages(np.concatenate(parts), equal, single)


def generalised_advantages(
    rewards: NDArray[np.float64], values: NDArray[np.float64], mask: NDArray[np.bool_], *, discount: float, trace: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return advantages and returns [n, s] of the masked tokens by generalised advantage estimation; 0 elsewhere.

    `rewards` and `values` are [n, s]: what token j earned, and the value V_j of the text before it. Over the masked
    tokens alone, in their order, with d_j = r_j + discount V_next - V_j:
        A_j = d_j + discount trace A_next,    return_j = A_j + V_j
    V and A behind the last masked token are 0, since the response ends there. Tokens outside the mask (prompt, padding,
    the output of a tool) are passed over: neither their rewards nor their values count, nor do they discount.
    Source: Schulman et al., GAE (arXiv 1506.02438), equation 16; `trace` is its lambda.
    """
    advantages = np.zeros(mask.shape, dtype=np.float64)
    next_value, next_advantage = np.zeros(len(mask)), np.zeros(len(mask))
    for column in reversed(range(mask.shape[1])):
        target, value = mask[:, column], values[:, column]
        advantage = rewards[:, column] + discount * next_value - value + discount * trace * next_advantage
        advantages[target, column] = advantage[target]
        next_advantage = np.where(target, advantage, next_advantage)
        next_value = np.where(target, value, next_value)
    return advantages, np.where(mask, advantages + values, 0.0)
