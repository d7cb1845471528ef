"""Batches: padding, masks, advantages and minibatches, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hetrl.runtime import wire
from hetrl.runtime.advantages import EPSILON, group_advantages
from hetrl.runtime.data import Prompt
from hetrl.runtime.experience import experience, largest_difference, minibatches, padded
from hetrl.runtime.sampling import Group, mean_reward, seed_of


def sample(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> wire.Sample:
    spans = (wire.VersionSpan(version=1, start=0, end=len(tokens)),)
    return wire.Sample(tokens=tokens, logprobs=logprobs, versions=spans, finish_reason="stop")


GROUPS = (
    Group(Prompt("q", "a"), (5, 6), (sample((7, 1), (-0.5, -0.25)), sample((8,), (-1.0,))), (1.0, 0.0)),
    Group(Prompt("r", "b"), (5,), (sample((9, 9, 1), (-0.1, -0.2, -0.3)), sample((9, 1), (-0.1, -0.2))), (0.0, 0.0)),
)


def test_advantages_by_hand() -> None:
    # Mean 0.25, population deviation sqrt(0.1875); an equal group and a group of one say nothing.
    deviation = np.sqrt(0.1875) + EPSILON
    expected = [0.75 / deviation, -0.25 / deviation, -0.25 / deviation, -0.25 / deviation]
    assert group_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]))[0] == pytest.approx(expected)
    assert not group_advantages(np.ones((3, 4))).any()
    assert not group_advantages(np.array([[0.3]])).any()


@given(arrays(np.float64, (3, 5), elements=st.floats(-10, 10)))
def test_advantages_are_centred_and_ignore_a_shift(rewards: np.ndarray) -> None:
    advantages = group_advantages(rewards)
    assert np.abs(advantages.sum(axis=1)).max() < 1e-6
    assert np.allclose(advantages, group_advantages(rewards + 2.0), atol=1e-4)


def test_experience_by_hand() -> None:
    batch = experience(GROUPS, pad_token=0)
    assert batch["tokens"].tolist() == [[5, 6, 7, 1], [5, 6, 8, 0], [5, 9, 9, 1], [5, 9, 1, 0]]
    assert batch["lengths"].tolist() == [4, 3, 4, 3]
    assert batch["mask"].tolist() == [
        [False, False, True, True],
        [False, False, True, False],
        [False, True, True, True],
        [False, True, True, False],
    ]
    assert np.allclose(batch["advantages"][0], [0, 0, 1, 1], atol=1e-4)
    assert np.allclose(batch["advantages"][1], [0, 0, -1, 0], atol=1e-4)
    assert not batch["advantages"][2:].any()
    assert batch["sampler_logprobs"][2].tolist() == pytest.approx([0, -0.1, -0.2, -0.3])
    assert {batch[name].dtype for name in ("advantages", "sampler_logprobs")} == {np.dtype(np.float32)}


def test_largest_difference_looks_at_responses_only() -> None:
    batch = experience(GROUPS, pad_token=0)
    batch["old_logprobs"] = batch["sampler_logprobs"].copy()
    batch["old_logprobs"][0, 0] = 9.0
    assert largest_difference(batch) == 0.0
    batch["old_logprobs"][3, 2] -= 0.5
    assert largest_difference(batch) == pytest.approx(0.5)


def test_minibatches_are_a_partition_in_order() -> None:
    parts = minibatches(experience(GROUPS, pad_token=0), 2)
    assert [part["lengths"].tolist() for part in parts] == [[4, 3], [4, 3]]
    assert np.concatenate([part["tokens"] for part in parts]).shape == (4, 4)


def test_padded_masks_only_responses() -> None:
    assert padded([((1, 2), (3,)), ((4,), ())], 0)["mask"].tolist() == [[False, False, True], [False, False, False]]


def test_mean_reward_counts_samples() -> None:
    assert mean_reward(GROUPS) == 0.25


def test_sampling_seeds_depend_on_everything_and_fit_31_bits() -> None:
    seeds = {seed_of(seed, stream, number) for seed in range(3) for stream in ("a", "b") for number in range(50)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(0, "step 1", 2) == seed_of(0, "step 1", 2)
