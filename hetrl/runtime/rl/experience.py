"""Arrays for training from groups of samples, in the order of an iteration:

arrays = experience(groups, pad_token)
arrays["reference_logprobs"] = ...      # from the engines; in PPO values
batch, measured = valued_batch(arrays, groups, algorithm)  # what the critic's loss reads
batch["old_logprobs"] = ...             # from the actor's trainer where algorithm.scores_batch; ahead if kl_in_reward
batch, measured = policy_batch(batch, groups, version, algorithm)
for part in minibatches(batch, algorithm.minibatches, algorithm): one optimiser step with loss_settings(algorithm)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.runtime.rl.advantages import (
    GroupAdvantages,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
)
from hetrl.runtime.rl.critic import actor_batch, against_values
from hetrl.runtime.rl.divergence import bounded_exp, importance_weights, kl_estimate
from hetrl.runtime.rl.sampling import PromptGroup
from hetrl.runtime.wire import LossSettings
from hetrl.runtime.wire.arrays import Arrays

DEFAULTS = AlgorithmSection()
log = logging.getLogger(__name__)


def padded(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], pad_token: int) -> Arrays:
    """Return tokens int64 [n, s], lengths int64 [n] and mask bool [n, s] (response tokens) of (prompt, response)."""
    lengths = np.array([len(prompt) + len(response) for prompt, response in sequences], dtype=np.int64)
    tokens = np.full((len(sequences), int(lengths.max())), pad_token, dtype=np.int64)
    mask = np.zeros(tokens.shape, dtype=np.bool_)
    for row, (prompt, response) in enumerate(sequences):
        tokens[row, : lengths[row]] = [*prompt, *response]
        mask[row, len(prompt) : lengths[row]] = True
    return {"tokens": tokens, "lengths": lengths, "mask": mask}


def experience(groups: Sequence[PromptGroup], pad_token: int) -> Arrays:
    """Return the batch of an iteration: `padded`, whose mask is of all response tokens, and sampler_logprobs [n, s]."""
    pairs = [(group, sample) for group in groups for sample in group.samples]
    arrays = padded([(group.prompt_tokens, sample.tokens) for group, sample in pairs], pad_token)
    sampler_logprobs = np.zeros(arrays["tokens"].shape, dtype=np.float32)
    for row, (group, sample) in enumerate(pairs):
        start = len(group.prompt_tokens)
        sampler_logprobs[row, start : start + len(sample.tokens)] = sample.logprobs
    arrays["sampler_logprobs"] = sampler_logprobs
    return arrays


def valued_batch(
    arrays: Mapping[str, NDArray[Any]], groups: Sequence[PromptGroup], algorithm: AlgorithmSection = DEFAULTS
) -> tuple[Arrays, dict[str, float]]:
    """Return a batch with what follows from its rewards, all that the critic's loss reads, and what to watch in it.

    `arrays` is an `experience` of the same groups with `reference_logprobs`, if there is a reference, and with the
    critic's `values` in PPO. With algorithm.kl_in "reward", which needs the trainer's `old_logprobs`, too, a token
    loses kl_coefficient x its KL estimate before the advantages are taken: DeepSeekMath (arXiv 2402.03300), equation 2,
    which PPO takes as it stands and GRPO summed over the response.
    With mask_truncated the mask leaves out responses that were cut off at the longest allowed: overlong filtering, DAPO
    (arXiv 2503.14476, section 3.4). Their rewards still count in what the others' advantages are relative to.

    Measured: groups_equal and groups_single (see GroupAdvantages), in PPO what `against_values` tells; kl_penalty, the
    mean over samples of what the reward lost.
    """
    mask = _trained(arrays["mask"], groups, algorithm)
    penalties = np.zeros(mask.shape)
    if algorithm.kl_in_reward:
        penalties = algorithm.kl_coefficient * _token_kl(arrays, algorithm.kl_estimator)
    rewards = [group.rewards for group in groups]
    if algorithm.kind == "ppo":
        of_rewards, measured = against_values(arrays, mask, [*chain(*rewards)], penalties, algorithm)
    else:
        of_rewards, measured = _against_others(_minus(rewards, penalties.sum(axis=1)), mask, algorithm)
    if algorithm.kl_in_reward:
        measured["kl_penalty"] = float(penalties.sum(axis=1).mean())
    return {**arrays, "mask": mask, **of_rewards}, measured


def policy_batch(
    batch: Mapping[str, NDArray[Any]],
    groups: Sequence[PromptGroup],
    version: int,
    algorithm: AlgorithmSection = DEFAULTS,
) -> tuple[Arrays, dict[str, float]]:
    """Return what the policy loss reads of a `valued_batch` that is trained from `version`, and what to watch in it.

    The batch has the trainer's `old_logprobs` where `algorithm.scores_batch`. Without them the loss itself computes
    what follows from them: the batch keeps sampler_logprobs and gets `fresh`, for `mismatch`. Otherwise it loses the
    sampler_logprobs, and may get importance_weights.
    With samples that may be stale (max_staleness above 0): objective "decoupled" clips against old_logprobs, taken
    under the weights that the step starts from, and weights each token by pi_old / pi_sampler; "coupled" clips against
    the policy that drew the token, so that old_logprobs are the sampler's: PPO as published (arXiv 1707.06347).

    Measured: importance_weight and importance_cut, means over tokens; mismatch.
    """
    mask = batch["mask"]
    fresh = drawn_under(version, groups, mask.shape[1]) & mask
    of_sampler, measured = _against_sampler(batch, mask, fresh, algorithm)
    kept = {name: array for name, array in actor_batch(batch).items() if name != "sampler_logprobs"}
    return kept | of_sampler, measured


def _against_others(
    rewards: Sequence[Sequence[float]], mask: NDArray[np.bool_], algorithm: AlgorithmSection
) -> tuple[Arrays, dict[str, float]]:
    """Return the advantages of samples over others, and how many groups do not say which is better.

    Logs a warning for groups of one sample, where samples are compared with others of their group.
    """
    advantages = _advantages(rewards, mask, algorithm)
    if advantages.single and algorithm.advantages != "reinforce++":
        log.warning(
            "%d of %d groups have one sample, with nothing to compare it with; raise algorithm.samples_per_prompt",
            advantages.single,
            len(rewards),
        )
    per_token = np.where(mask, advantages.values[:, None], 0.0).astype(np.float32)
    return {"advantages": per_token}, {"groups_equal": advantages.equal, "groups_single": advantages.single}


def _against_sampler(
    arrays: Mapping[str, NDArray[Any]], mask: NDArray[np.bool_], fresh: NDArray[np.bool_], algorithm: AlgorithmSection
) -> tuple[Arrays, dict[str, float]]:
    """Return what a batch and what is measured get from the sampler's log-probs; `fresh` marks tokens of this version.

    `mask` and `fresh` [n, s] are of tokens that are trained on.
    """
    batch, measured = Arrays(), dict[str, float]()
    if not algorithm.scores_batch:
        batch |= {"sampler_logprobs": arrays["sampler_logprobs"], "fresh": fresh.astype(np.float32)}
    elif (difference := mismatch(arrays, fresh)) is not None:
        measured["mismatch"] = difference
    if algorithm.ratio_to_sampler:
        batch["old_logprobs"] = arrays["sampler_logprobs"]
    elif _corrects(algorithm) and algorithm.scores_batch and mask.any():
        weights, cut = importance_weights(
            arrays["old_logprobs"],
            arrays["sampler_logprobs"],
            mask,
            bound=algorithm.importance_bound,
            cap=algorithm.correction_cap,
            bounds=algorithm.correction_bounds,
        )
        batch["importance_weights"] = weights
        measured |= {"importance_weight": float(weights[mask].mean()), "importance_cut": cut}
    return batch, measured


def minibatches(
    arrays: Mapping[str, NDArray[Any]], number: int, algorithm: AlgorithmSection = DEFAULTS
) -> list[Arrays]:
    """Cut a batch into `number` parts of consecutive samples, as equal as can be, each with the weights it needs."""
    edges = [len(arrays["tokens"]) * part // number for part in range(number + 1)]
    parts = [{name: array[start:end] for name, array in arrays.items()} for start, end in pairwise(edges)]
    if algorithm.normalisation != "token-mean":
        for part in parts:
            part["token_weights"] = token_weights(part["mask"], algorithm.normalisation_tokens)
    return parts


def token_weights(mask: NDArray[np.bool_], constant: int | None) -> NDArray[np.float32]:
    """Return the weights [n, s] that turn a mean over the tokens of a minibatch into a mean over its samples.

    The engine divides the sum of a minibatch by its T masked tokens, whatever the split over replicas. With N samples
    that have a target and |o_i| of them in sample i, the weight of a token is
        T / (N |o_i|)       `constant` None: sum_i (1 / |o_i|) sum_t loss / N, GRPO (arXiv 2402.03300, equation 3)
        T / (N constant)    sum_i sum_t loss / (N constant), Dr. GRPO (arXiv 2503.20783, section 3.2), whose constant is
                            the longest response that was allowed
    The mean over tokens, DAPO's (arXiv 2503.14476, equation 8), needs no weights. Weights are 0 outside the mask.
    """
    targets = mask.sum(axis=1, keepdims=True)
    samples = max(1, int((targets > 0).sum()))
    divisor = np.maximum(targets, 1) if constant is None else constant
    return np.where(mask, mask.sum() / (samples * divisor), 0.0).astype(np.float32)


def loss_settings(algorithm: AlgorithmSection) -> LossSettings:
    """Return how an optimiser step with the policy loss is taken."""
    first_step = not (algorithm.scores_batch or algorithm.ratio_to_sampler)
    return LossSettings(
        learning_rate=algorithm.learning_rate,
        temperature=algorithm.temperature,
        ratio=algorithm.ratio,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        kl_coefficient=algorithm.kl_coefficient if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coefficient=algorithm.entropy_coefficient,
        first_step=first_step,
        correction=algorithm.importance_bound if first_step and _corrects(algorithm) else None,
        correction_cap=algorithm.correction_cap,
        correction_bounds=algorithm.correction_bounds,
    )


def mismatch(arrays: Mapping[str, NDArray[Any]], fresh: NDArray[np.bool_]) -> float | None:
    """Return the mean of |log p(sampler) - log p(trainer)| over the `fresh` tokens: the mismatch of the two engines.

    Tokens that were drawn under older weights differ because the policies do; None where no token is fresh.
    """
    difference = np.abs(arrays["sampler_logprobs"] - arrays["old_logprobs"])[fresh]
    return float(difference.mean()) if difference.size else None


def drawn_under(version: int, groups: Sequence[PromptGroup], width: int) -> NDArray[np.bool_]:
    """Return bool [n, width]: the response tokens that were drawn under this weight version."""
    pairs = [(group, sample) for group in groups for sample in group.samples]
    fresh = np.zeros((len(pairs), width), dtype=np.bool_)
    for row, (group, sample) in enumerate(pairs):
        start = len(group.prompt_tokens)
        for span in sample.versions:
            fresh[row, start + span.start : start + span.end] = span.version == version
    return fresh


def _corrects(algorithm: AlgorithmSection) -> bool:
    """Return whether tokens are weighed by p(trainer) / p(sampler)."""
    return not algorithm.ratio_to_sampler and (algorithm.max_staleness > 0 or algorithm.importance_bound != "none")


def _trained(mask: NDArray[np.bool_], groups: Sequence[PromptGroup], algorithm: AlgorithmSection) -> NDArray[np.bool_]:
    """Return the response tokens [n, s] that are trained on: all, or those of responses that were not cut off."""
    if not algorithm.mask_truncated:
        return mask
    whole = [sample.finish_reason != "length" for group in groups for sample in group.samples]
    trained: NDArray[np.bool_] = mask & np.array(whole)[:, None]
    return trained


def _advantages(
    rewards: Sequence[Sequence[float]], mask: NDArray[np.bool_], algorithm: AlgorithmSection
) -> GroupAdvantages:
    """Return those of `algorithm`; `mask` [n, s] says which tokens are trained on."""
    match algorithm.advantages:
        case "grpo":
            return group_advantages(rewards, algorithm.advantage_std, algorithm.advantage_epsilon)
        case "rloo":
            return leave_one_out_advantages(rewards)
    baseline = algorithm.advantages == "reinforce++-baseline"
    return batch_advantages(rewards, mask.sum(axis=1), baseline=baseline, epsilon=algorithm.advantage_epsilon)


def _token_kl(arrays: Mapping[str, NDArray[Any]], estimator: str) -> NDArray[np.float64]:
    """Return the KL estimates [n, s] of the response tokens, 0 elsewhere."""
    distance = arrays["reference_logprobs"].astype(np.float64) - arrays["old_logprobs"]
    estimates: NDArray[np.float64] = kl_estimate(estimator, np.where(arrays["mask"], distance, 0.0), bounded_exp)
    return estimates


def _minus(rewards: Sequence[Sequence[float]], penalties: NDArray[np.float64]) -> list[tuple[float, ...]]:
    """Take each sample's penalty off its reward; penalties are in the order of the samples."""
    rest = iter(penalties.tolist())
    return [tuple(reward - next(rest) for reward in group) for group in rewards]
