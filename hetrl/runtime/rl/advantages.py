"""Advantages: relative to a group of samples (GRPO, RLOO) or to a batch (REINFORCE++), from a value model (PPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-6


@dataclass(frozen=True)
class GroupAdvantages:
    """One advantage per sample, group after group, float64, and how many groups do not say which sample is better.

    `equal` counts groups of two or more samples whose rewards are all the same, `single` groups of one sample.
    """

    values: NDArray[np.float64]
    equal: int
    single: int


def group_advantages(
    rewards: Sequence[Sequence[float]], std: str = "unbiased", epsilon: float = EPSILON
) -> GroupAdvantages:
    """Return the advantage of each sample against the other samples of its prompt; groups may differ in size.

    With `std`
        unbiased  (r - mean) / (sigma + epsilon), sigma^2 = sum (r - mean)^2 / (G - 1) over the group's G samples: GRPO,
                  DeepSeekMath (arXiv 2402.03300), section 4.1.2, which leaves the kind of deviation open; verl and TRL
                  take the unbiased one (torch.std), verl this epsilon
        batch     the same with the unbiased deviation of the rewards of all samples: Lite PPO (arXiv 2508.08221), and
                  `scale_rewards: batch` of TRL. A group's deviation is small where a prompt is nearly solved
        none      r - mean: Dr. GRPO (arXiv 2503.20783), section 3.1: the deviation gives more weight to prompts that
                  are nearly always or nearly never answered
    A group with equal rewards, or with one sample, has advantages of exactly zero: it does not say which is better.
    """
    parts = [_centred(np.asarray(group, dtype=np.float64)) for group in rewards]
    if std == "unbiased":
        parts = [part / (_deviation(part) + epsilon) for part in parts]
    values = np.concatenate(parts)
    if std == "batch":
        values = values / (_deviation(np.concatenate([[*group] for group in rewards])) + epsilon)
    return _counted(values, rewards)


def leave_one_out_advantages(rewards: Sequence[Sequence[float]]) -> GroupAdvantages:
    """Return r_i - mean of the rewards of the group's other samples, which is G / (G - 1) (r_i - mean).

    A group with equal rewards, or with one sample, has advantages of exactly zero. Source: RLOO, Ahmadian et al. (arXiv
    2402.14740), after Kool et al. ("Buy 4 REINFORCE samples, get a baseline for free").
    """
    centred = [_centred(np.asarray(group, dtype=np.float64)) for group in rewards]
    return _counted(np.concatenate([part * len(part) / max(1, len(part) - 1) for part in centred]), rewards)


def batch_advantages(
    rewards: Sequence[Sequence[float]], tokens: NDArray[np.int64], *, baseline: bool, epsilon: float = EPSILON
) -> GroupAdvantages:
    """Return (x - mean) / (sigma + epsilon) with mean and unbiased deviation over the tokens of the whole batch.

    x is a sample's reward, with `baseline` less the mean of its group (0 in a group of one sample). `tokens` [n] are
    how many of each sample are trained on, in the order of the samples: each counts in the two moments, as every token
    has its advantage. All are zero where no two x of samples with tokens differ. A group with equal rewards is not
    zero: it lies somewhere in the batch. Source: REINFORCE++ and REINFORCE++-baseline (arXiv 2501.03262); moments over
    tokens as in OpenRLHF and verl (`masked_whiten`).
    """
    groups = [np.asarray(group, dtype=np.float64) for group in rewards]
    values = np.concatenate([_centred(group) if baseline else group for group in groups])
    counted, total = values[tokens > 0], int(tokens.sum())
    if not len(counted) or (counted == counted[0]).all():
        return _counted(np.zeros_like(values), rewards)
    mean = float((values * tokens).sum() / total)
    sigma = np.sqrt(((values - mean) ** 2 * tokens).sum() / (total - 1))
    return _counted((values - mean) / (sigma + epsilon), rewards)


def _centred(group: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rewards less their mean: exactly zero where they are equal."""
    return np.zeros_like(group) if (group == group[0]).all() else group - group.mean()


def _deviation(values: NDArray[np.float64]) -> float:
    """Return the unbiased standard deviation, 0 of one value."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def _counted(values: NDArray[np.float64], rewards: Sequence[Sequence[float]]) -> GroupAdvantages:
    """Count the groups that do not say which of their samples is better."""
    single = sum(len(group) < 2 for group in rewards)
    equal = sum(len(group) >= 2 and len(set(group)) == 1 for group in rewards)
    return GroupAdvantages(values, equal, single)


def whitened(
    values: NDArray[np.float64], mask: NDArray[np.bool_], *, centred: bool = True, epsilon: float = 1e-8
) -> NDArray[np.float64]:
    """Return (x - mean) / sqrt(variance + epsilon) over the masked tokens [n, s], elsewhere 0; not `centred`: x / it.

    The variance is unbiased. Tokens that are all alike, one, or none, have nothing to be compared with: 0, or not
    `centred` the values themselves.
    Source, centred: `masked_whiten` of TRL and verl; not centred theirs adds the mean, which would pay every token.
    """
    chosen = values[mask]
    mean = float(chosen.mean()) if len(chosen) and centred else 0.0
    scale = np.sqrt(chosen.var(ddof=1) + epsilon) if len(chosen) > 1 and np.ptp(chosen) > 0 else 1.0
    return np.where(mask, (values - mean) / scale, 0.0)


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
