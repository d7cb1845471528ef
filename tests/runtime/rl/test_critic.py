"""PPO's part of a training batch, held against loops over single samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.runtime.rl.critic import actor_batch, against_values, critic_batch, token_rewards

PPO: dict[str, Any] = {"kind": "ppo"}
NAMES = ("tokens", "lengths", "mask", "advantages", "values", "old_values", "returns")


def masks(lengths: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return the mask [n, s] of responses that begin and end there."""
    columns = np.arange(max(end for _, end in lengths))
    return np.array([(columns >= start) & (columns < end) for start, end in lengths])


def by_hand(
    rewards: list[float], values: list[float], discount: float, trace: float
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of one response by the definition: sums of what follows."""
    errors = [
        reward + discount * (values[place + 1] if place + 1 < len(values) else 0.0) - values[place]
        for place, reward in enumerate(rewards)
    ]
    advantages = [
        sum((discount * trace) ** (later - place) * errors[later] for later in range(place, len(errors)))
        for place in range(len(errors))
    ]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), discount=st.sampled_from([1.0, 0.9]), trace=st.sampled_from([1.0, 0.95, 0.0]))
def test_a_batch_is_what_loops_over_its_samples_give(data: st.DataObject, discount: float, trace: float) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(4, 7)), min_size=1, max_size=4))
    mask, rng = masks(lengths), np.random.default_rng(len(lengths))
    values, penalties = rng.normal(size=(2, *mask.shape))
    rewards = rng.normal(size=len(lengths)).tolist()
    algorithm = AlgorithmSection.model_validate(
        {**PPO, "discount": discount, "trace": trace, "whiten_advantages": False}
    )
    arrays = {"mask": mask, "values": np.where(mask, values, 99.0).astype(np.float32)}
    batch, measured = against_values(arrays, mask, rewards, penalties, algorithm)
    every_return, every_value = [], []
    for row, (start, end) in enumerate(lengths):
        earned = [-penalty for penalty in penalties[row, start:end]]
        earned[-1] += rewards[row]
        own = arrays["values"][row, start:end].astype(float).tolist()
        advantages, returns = by_hand(earned, own, discount, trace)
        assert batch["advantages"][row, start:end].tolist() == pytest.approx(advantages, abs=1e-5)
        assert batch["returns"][row, start:end].tolist() == pytest.approx(returns, abs=1e-5)
        every_return += returns
        every_value += own
    assert not batch["advantages"][~mask].any() and not batch["returns"][~mask].any()
    left = np.var(np.array(every_return) - np.array(every_value)) / np.var(every_return)
    assert measured["explained_variance"] == pytest.approx(1.0 - left, abs=1e-4)
    assert measured["value"] == pytest.approx(np.mean(every_value), abs=1e-5)
    assert measured["return"] == pytest.approx(np.mean(every_return), abs=1e-5)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens_that_are_trained_on() -> None:
    mask = masks([(1, 4), (2, 6), (1, 5)])
    trained = mask & np.array([True, True, False])[:, None]
    rng = np.random.default_rng(0)
    arrays = {"mask": mask, "values": rng.normal(size=mask.shape).astype(np.float32)}
    plain, white = (
        against_values(
            arrays, trained, [1.0, 0.0, 5.0], np.zeros(mask.shape), AlgorithmSection(kind="ppo", whiten_advantages=on)
        )[0]
        for on in (False, True)
    )
    chosen = white["advantages"][trained]
    assert chosen.mean() == pytest.approx(0.0, abs=1e-6)
    assert chosen.std(ddof=1) == pytest.approx(1.0, rel=1e-6)
    raw = plain["advantages"][trained]
    assert chosen == pytest.approx((raw - raw.mean()) / raw.std(ddof=1), rel=1e-4)
    assert not white["advantages"][2].any()  # cut off: neither trained on nor counted
    assert (white["returns"] == plain["returns"]).all()


def test_whitened_rewards_are_divided_by_their_deviation_and_keep_their_mean() -> None:
    mask = masks([(1, 3), (1, 3)])
    arrays = {"mask": mask, "values": np.zeros(mask.shape, np.float32)}
    algorithm = AlgorithmSection(kind="ppo", trace=1.0, whiten_advantages=False, whiten_rewards=True)
    batch, _ = against_values(arrays, mask, [4.0, 0.0], np.zeros(mask.shape), algorithm)
    assert batch["returns"][0].tolist() == pytest.approx([0.0, 2.0, 2.0])  # rewards 0, 4, 0, 0: deviation 2
    assert not batch["returns"][1].any()


def test_a_reward_stands_at_the_last_token_of_its_response_and_nowhere_without_one() -> None:
    mask = masks([(1, 3), (2, 5)])
    mask[1] = False
    earned = token_rewards([2.0, 7.0], np.full(mask.shape, 0.25), mask)
    assert earned.tolist() == [[0.0, -0.25, 1.75, 0.0, 0.0], [0.0] * 5]


def test_a_critic_that_knows_the_returns_explains_them_and_equal_returns_leave_nothing_to_explain() -> None:
    mask, penalties = masks([(1, 2), (1, 2)]), np.zeros((2, 2))
    algorithm = AlgorithmSection(kind="ppo", whiten_advantages=False)
    arrays = {"mask": mask, "values": np.array([[0, 1.0], [0, 0.0]], np.float32)}
    assert against_values(arrays, mask, [1.0, 0.0], penalties, algorithm)[1]["explained_variance"] == 1.0
    assert "explained_variance" not in against_values(arrays, mask, [1.0, 1.0], penalties, algorithm)[1]


def test_actor_and_critic_are_each_sent_what_they_read() -> None:
    batch: dict[str, Any] = dict.fromkeys(
        ("tokens", "lengths", "mask", "advantages", "values", "old_values", "returns")
    )
    assert set(actor_batch(batch)) == {"tokens", "lengths", "mask", "advantages"}
    assert set(critic_batch(batch)) == {"tokens", "lengths", "mask", "old_values", "returns"}
