"""The three means of the loss, written out sample by sample, equal what the pieces of a cut minibatch add up to."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.runtime.rl import losses
from hetrl.runtime.rl.experience import Arrays, loss_settings, minibatches, padded

LENGTHS = (1, 4, 2, 7, 3, 5, 6, 2)
CLIP = 0.2


def batch(seed: int) -> Arrays:
    """Return eight samples of unequal length with random log-probs and advantages."""
    rng = np.random.default_rng(seed)
    arrays = padded([((1, 2), (3,) * length) for length in LENGTHS], 0)
    for name in ("logprobs", "old_logprobs", "advantages"):
        arrays[name] = rng.normal(size=arrays["mask"].shape).astype(np.float32)
    return arrays


def token_losses(arrays: Arrays, sample: int) -> list[float]:
    """Return -min(r A, clip(r) A) of each token of a sample's response."""
    found = []
    for token in range(2, 2 + LENGTHS[sample]):
        new, old, advantage = (
            float(arrays[name][sample, token]) for name in ("logprobs", "old_logprobs", "advantages")
        )
        ratio = math.exp(new - old)
        found.append(-min(ratio * advantage, min(max(ratio, 1 - CLIP), 1 + CLIP) * advantage))
    return found


def by_hand(arrays: Arrays, samples: range, normalisation: str, constant: int | None) -> float:
    """Return the loss of a minibatch as its paper writes it."""
    rows = [token_losses(arrays, sample) for sample in samples]
    if normalisation == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    return sum(sum(row) / (constant or len(row)) for row in rows) / len(rows)


def in_pieces(part: Arrays, algorithm: AlgorithmSection, cuts: list[int]) -> float:
    """Return what the engine reports: the sums of the pieces, over the tokens of the whole minibatch."""
    total = 0.0
    edges = [0, *sorted(cuts), len(part["tokens"])]
    for start, end in pairwise(edges):
        tensors: dict[str, Any] = {name: torch.from_numpy(array[start:end]) for name, array in part.items()}
        logprobs, mask = tensors.pop("logprobs"), tensors.pop("mask")
        total += float(losses.evaluate(logprobs, mask, tensors, loss_settings(algorithm))[0])
    return total / int(part["mask"].sum())


MEANS = [("token-mean", None), ("sequence-mean", None), ("constant", 7)]


@pytest.mark.parametrize(("normalisation", "constant"), MEANS)
@given(st.lists(st.integers(0, 4), max_size=3), st.integers(0, 5))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_each_mean_is_that_of_its_paper_however_the_minibatch_is_cut(
    normalisation: str, constant: int | None, cuts: list[int], seed: int
) -> None:
    algorithm = AlgorithmSection.model_validate(
        {"normalisation": normalisation, "normalisation_tokens": constant, "minibatches": 2}
    )
    arrays = batch(seed)
    for number, part in enumerate(minibatches(arrays, 2, algorithm)):
        samples = range(4 * number, 4 * number + 4)
        assert in_pieces(part, algorithm, cuts) == pytest.approx(
            by_hand(arrays, samples, normalisation, constant), rel=1e-5, abs=1e-6
        )


def test_the_three_means_differ() -> None:
    arrays = batch(0)
    assert len({round(by_hand(arrays, range(8), *mean), 6) for mean in MEANS}) == 3
