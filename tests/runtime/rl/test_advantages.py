"""Advantages against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from hetrl.runtime.rl.advantages import (
    batch_advantages,
    generalised_advantages,
    group_advantages,
    leave_one_out_advantages,
    whitened,
)

REWARDS = arrays(np.float64, (3, 5), elements=st.floats(-10, 10))


def test_rewards_are_centred_and_divided_by_the_unbiased_deviation() -> None:
    # Mean 0.25; the squares about it sum to 0.75, over 3: sigma is 0.5.
    advantages = group_advantages([[1.0, 0.0, 0.0, 0.0]], epsilon=0.25)
    assert advantages.values.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert (advantages.equal, advantages.single) == (0, 0)


def test_without_deviation_rewards_are_centred_alone() -> None:
    assert group_advantages([[3.0, 1.0], [0.0, 4.0]], "none").values.tolist() == [1.0, -1.0, -2.0, 2.0]


def test_equal_and_single_groups_are_exactly_zero_and_counted() -> None:
    # 0.1 + 0.1 + 0.1 over 3 is not 0.1 in floating point.
    advantages = group_advantages([[0.1, 0.1, 0.1], [7.0], [1.0, 0.0], [2.0, 2.0]], epsilon=1e-12)
    assert advantages.values[[0, 1, 2, 3, 6, 7]].tolist() == [0.0] * 6
    assert advantages.values[4:6].tolist() == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)])
    assert (advantages.equal, advantages.single) == (2, 1)


@given(REWARDS)
def test_advantages_sum_to_zero_in_each_group(rewards: np.ndarray) -> None:
    assert np.abs(group_advantages(rewards).values.reshape(3, 5).sum(axis=1)).max() < 1e-6


@given(arrays(np.int64, (2, 4), elements=st.integers(-9, 9)), st.integers(-5, 5), st.integers(1, 4))
def test_advantages_ignore_a_shift_and_nearly_a_scale(rewards: np.ndarray, shift: int, scale: int) -> None:
    plain = group_advantages(rewards.astype(float)).values
    assert np.allclose(plain, group_advantages((rewards * scale + shift).astype(float)).values, atol=1e-4)


def test_over_the_deviation_of_the_batch_groups_keep_their_proportions() -> None:
    # All rewards: mean 0.5, squares about it 8 x 0.25 over 7. Centred: 0.75 and -0.25, 0.25 and -0.75; the third is 0.
    sigma = np.sqrt(2.0 / 7)
    found = group_advantages([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]], "batch", epsilon=0.5).values * (sigma + 0.5)
    assert found.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75])
    advantages = group_advantages([[0.1, 0.1, 0.1], [7.0], [1.0, 0.0]], "batch")
    assert advantages.values[:4].tolist() == [0.0] * 4 and advantages.values[4] > 0
    assert (advantages.equal, advantages.single) == (1, 1)
    assert group_advantages([[0.1, 0.1, 0.1]], "batch").values.tolist() == [0.0] * 3


@given(REWARDS)
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(rewards: np.ndarray) -> None:
    found = leave_one_out_advantages(rewards).values.reshape(3, 5)
    for group, advantages in zip(rewards, found, strict=True):
        others = [np.delete(group, sample).mean() for sample in range(5)]
        assert np.allclose(advantages, group - others, atol=1e-12)


def test_leave_one_out_of_equal_and_single_groups_is_exactly_zero() -> None:
    advantages = leave_one_out_advantages([[0.1, 0.1, 0.1], [7.0], [1.0, 0.0]])
    assert advantages.values.tolist() == [0.0] * 4 + [1.0, -1.0]
    assert (advantages.equal, advantages.single) == (1, 1)


def test_over_the_tokens_of_a_batch_by_hand() -> None:
    # Rewards 1 on 1 token and 0 on 3: mean 0.25, squares 0.75 over 3, sigma 0.5.
    tokens = np.array([1, 3])
    for rewards in ([[1.0, 0.0]], [[1.0], [0.0]]):
        found = batch_advantages(rewards, tokens, baseline=False, epsilon=0.5).values
        assert found.tolist() == pytest.approx([0.75, -0.25])
    # With the means of the groups off: 0.5, -0.5, 0, 0 on 2, 1, 1 and 1 tokens; mean 0.1, squares 0.7 over 4.
    found = batch_advantages([[1.0, 0.0], [3.0, 3.0]], np.array([2, 1, 1, 1]), baseline=True, epsilon=0.0).values
    assert (found * np.sqrt(0.7 / 4)).tolist() == pytest.approx([0.4, -0.6, -0.1, -0.1])


@given(REWARDS, st.lists(st.integers(0, 4), min_size=15, max_size=15), st.booleans())
def test_over_the_tokens_of_a_batch_is_what_whitening_all_tokens_gives(
    rewards: np.ndarray, lengths: list[int], baseline: bool
) -> None:
    tokens = np.array(lengths)
    found = batch_advantages(rewards.round() * 5, tokens, baseline=baseline, epsilon=0.0)
    per_token = np.repeat(found.values, tokens)
    assert np.isfinite(found.values).all()
    if per_token.any():
        assert per_token.mean() == pytest.approx(0.0, abs=1e-6)
        assert per_token.std(ddof=1) == pytest.approx(1.0)


@pytest.mark.parametrize("baseline", [True, False])
def test_a_batch_whose_rewards_are_equal_says_nothing(baseline: bool) -> None:
    advantages = batch_advantages([[0.1, 0.1, 0.1], [0.1]], np.array([1, 2, 3, 4]), baseline=baseline)
    assert advantages.values.tolist() == [0.0] * 4
    assert (advantages.equal, advantages.single) == (1, 1)


def test_tokens_that_are_all_alike_have_no_deviation_to_be_divided_by() -> None:
    values, mask = np.full((2, 2), 0.5), np.array([[True, False], [True, True]])
    assert whitened(values, mask).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert whitened(values, mask, centred=False).tolist() == [[0.5, 0.0], [0.5, 0.5]]


def test_gae_by_hand_passes_over_what_is_not_a_target() -> None:
    # Targets are columns 1, 3 and 4; column 2 is the output of a tool, 0 the prompt, 5 padding.
    mask = np.array([[False, True, False, True, True, False]])
    rewards = np.array([[9.0, 1.0, 9.0, 0.0, 2.0, np.nan]])
    values = np.array([[9.0, 0.5, 9.0, 1.0, 1.5, np.nan]])
    # discount 0.5, trace 0.5, from the end:
    # d4 = 2 - 1.5 = 0.5;  d3 = 0 + 0.5 * 1.5 - 1 = -0.25;  d1 = 1 + 0.5 * 1 - 0.5 = 1
    # A4 = 0.5;  A3 = -0.25 + 0.25 * 0.5 = -0.125;  A1 = 1 + 0.25 * -0.125 = 0.96875
    advantages, returns = generalised_advantages(rewards, values, mask, discount=0.5, trace=0.5)
    assert advantages[0].tolist() == [0.0, 0.96875, 0.0, -0.125, 0.5, 0.0]
    assert returns[0].tolist() == [0.0, 1.46875, 0.0, 0.875, 2.0, 0.0]


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_gae_at_trace_1_is_the_discounted_return_less_the_value_and_at_0_the_error(discount: float) -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 3, 6))
    mask = np.ones((3, 6), dtype=bool)
    _, returns = generalised_advantages(rewards, values, mask, discount=discount, trace=1.0)
    powers = discount ** np.arange(6)
    for column in range(6):
        assert returns[:, column] == pytest.approx((rewards[:, column:] * powers[: 6 - column]).sum(axis=1))
    errors, _ = generalised_advantages(rewards, values, mask, discount=discount, trace=0.0)
    following = np.concatenate([values[:, 1:], np.zeros((3, 1))], axis=1)
    assert np.allclose(errors, rewards + discount * following - values)


def test_gae_does_not_change_with_padding_and_a_longer_prompt() -> None:
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=(2, 2, 4))
    mask = np.array([[True, True, True, True], [True, False, True, False]])
    wide = [np.pad(array, ((0, 0), (3, 2)), constant_values=array.dtype.type(1)) for array in (rewards, values)]
    plain = generalised_advantages(rewards, values, mask, discount=0.9, trace=0.8)
    padded = generalised_advantages(*wide, np.pad(mask, ((0, 0), (3, 2))), discount=0.9, trace=0.8)
    for small, large in zip(plain, padded, strict=True):
        assert np.array_equal(small, large[:, 3:7])
        assert not large[:, [0, 1, 2, 7, 8]].any()
