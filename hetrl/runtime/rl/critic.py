"""PPO's part of a training batch: rewards of tokens, advantages and returns from the critic's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.describe.experiment import Critic
from hetrl.runtime.rl.advantages import generalised_advantages, whitened
from hetrl.runtime.wire import LossSettings
from hetrl.runtime.wire.arrays import Arrays

OF_CRITIC = ("old_values", "returns")  # what the critic's loss reads and the actor's does not


def against_values(
    arrays: Mapping[str, NDArray[Any]],
    mask: NDArray[np.bool_],
    rewards: Sequence[float],
    penalties: NDArray[np.float64],
    algorithm: AlgorithmSection,
) -> tuple[Arrays, dict[str, float]]:
    """Return what a batch and what is measured get from the critic's `values` [n, s] in `arrays`.

    Advantages, old_values and returns are float32 [n, s]. `rewards` are one per sample, `penalties` [n, s] what each
    token's reward loses (KL), `mask` [n, s] the tokens that are trained on: those of cut-off responses may be left out
    of it, and count neither in the moments of whitened advantages nor in explained_variance, 1 - Var(return - value) /
    Var(return), which is 0 for a critic that knows nothing of the text. Sources: PPO as in InstructGPT (arXiv
    2203.02155, section 3.5); the order of its steps is that of Huang et al. (arXiv 2403.17031).
    """
    responses, values = arrays["mask"], arrays["values"].astype(np.float64)
    earned = token_rewards(rewards, penalties, responses)
    if algorithm.whiten_rewards:
        earned = whitened(earned, responses, centred=False)
    advantages, returns = generalised_advantages(
        earned, values, responses, discount=algorithm.discount, trace=algorithm.trace
    )
    measured = {"value": float(values[mask].mean()), "return": float(returns[mask].mean())} if mask.any() else {}
    if mask.any() and (spread := float(returns[mask].var())) > 0:
        measured["explained_variance"] = 1.0 - float((returns - values)[mask].var()) / spread
    if algorithm.whiten_advantages:
        advantages = whitened(advantages, mask)
    found = {"advantages": np.where(mask, advantages, 0.0), "old_values": values, "returns": returns}
    return {name: array.astype(np.float32) for name, array in found.items()}, measured


def token_rewards(
    rewards: Sequence[float], penalties: NDArray[np.float64], mask: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return [n, s]: each response's reward at its last token, less what its tokens lose; 0 outside of `mask`."""
    earned = np.where(mask, -penalties, 0.0)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - mask[rows, ::-1].argmax(axis=1)
    earned[rows, last] += np.asarray(rewards, dtype=np.float64)[rows]
    return earned


def critic_batch(batch: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return what the critic is trained on."""
    return {name: batch[name] for name in ("tokens", "lengths", "mask", *OF_CRITIC)}


def actor_batch(batch: Mapping[str, NDArray[Any]]) -> Arrays:
    """Return what the actor is trained on."""
    return {name: array for name, array in batch.items() if name not in (*OF_CRITIC, "values")}


def value_settings(critic: Critic) -> LossSettings:
    """Return how a step of the critic is taken: a mean over the tokens of a minibatch, whatever the actor's is."""
    return LossSettings(loss="value", learning_rate=critic.learning_rate, value_clip=critic.value_clip)
