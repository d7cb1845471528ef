"""Arrays for training from groups of samples: right-padded tokens, masks, advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrl.runtime.advantages import group_advantages
from hetrl.runtime.sampling import Group

Arrays = dict[str, NDArray[Any]]


def padded(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], pad_token: int) -> Arrays:
    """Return tokens int64 [n, s], lengths int64 [n] and mask bool [n, s] (response tokens) of (prompt, response)."""
    lengths = np.array([len(prompt) + len(response) for prompt, response in sequences], dtype=np.int64)
    tokens = np.full((len(sequences), int(lengths.max())), pad_token, dtype=np.int64)
    mask = np.zeros(tokens.shape, dtype=np.bool_)
    for row, (prompt, response) in enumerate(sequences):
        tokens[row, : lengths[row]] = [*prompt, *response]
        mask[row, len(prompt) : lengths[row]] = True
    return {"tokens": tokens, "lengths": lengths, "mask": mask}


def experience(groups: Sequence[Group], pad_token: int) -> Arrays:
    """Return the batch of an iteration: `padded` plus advantages and sampler_logprobs, float32 [n, s]."""
    pairs = [(group, sample) for group in groups for sample in group.samples]
    arrays = padded([(group.prompt_tokens, sample.tokens) for group, sample in pairs], pad_token)
    advantages = group_advantages(np.array([group.rewards for group in groups])).reshape(-1)
    arrays["advantages"] = np.where(arrays["mask"], advantages[:, None], 0.0).astype(np.float32)
    sampler_logprobs = np.zeros(arrays["tokens"].shape, dtype=np.float32)
    for row, (group, sample) in enumerate(pairs):
        start = len(group.prompt_tokens)
        sampler_logprobs[row, start : start + len(sample.tokens)] = sample.logprobs
    arrays["sampler_logprobs"] = sampler_logprobs
    return arrays


def minibatches(arrays: Mapping[str, NDArray[Any]], number: int) -> list[Arrays]:
    """Cut a batch into `number` equal parts of consecutive samples."""
    size = len(arrays["tokens"]) // number
    return [
        {name: array[start : start + size] for name, array in arrays.items()} for start in range(0, size * number, size)
    ]


def largest_difference(arrays: Mapping[str, NDArray[Any]]) -> float:
    """Return max |log p(sampler) - log p(trainer)| over response tokens: the mismatch of the two engines."""
    difference = np.abs(arrays["sampler_logprobs"] - arrays["old_logprobs"])
    return float(difference[arrays["mask"]].max())
