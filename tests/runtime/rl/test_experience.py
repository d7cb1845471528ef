"""Batches: padding, masks, advantages and minibatches, against values worked out by hand."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.runtime import wire
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.rl.experience import (
    DEFAULTS,
    Arrays,
    drawn_under,
    experience,
    loss_settings,
    minibatches,
    mismatch,
    padded,
    policy_batch,
    token_weights,
    valued_batch,
)
from hetrl.runtime.rl.sampling import PromptGroup, mean_of, seed_of


def sample(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> wire.Sample:
    spans = (wire.VersionSpan(version=1, start=0, end=len(tokens)),)
    return wire.Sample(tokens=tokens, logprobs=logprobs, versions=spans, finish_reason="stop")


GROUPS = (
    PromptGroup(Prompt("q", "a"), (5, 6), (sample((7, 1), (-0.5, -0.25)), sample((8,), (-1.0,))), (1.0, 0.0)),
    PromptGroup(
        Prompt("r", "b"), (5,), (sample((9, 9, 1), (-0.1, -0.2, -0.3)), sample((9, 1), (-0.1, -0.2))), (0.0, 0.0)
    ),
)


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
    assert batch["sampler_logprobs"][2].tolist() == pytest.approx([0, -0.1, -0.2, -0.3])
    assert batch["sampler_logprobs"].dtype == np.float32
    advantages = training_batch(batch, GROUPS, 1)[0]["advantages"]
    half = np.sqrt(0.5)  # rewards 1 and 0: centred to 1/2 and -1/2, over their unbiased deviation sqrt(1/2)
    assert np.allclose(advantages[0], [0, 0, half, half], atol=1e-5)
    assert np.allclose(advantages[1], [0, 0, -half, 0], atol=1e-5)
    assert not advantages[2:].any() and advantages.dtype == np.float32


def test_the_mismatch_is_the_mean_over_responses_of_this_version_alone() -> None:
    batch = experience(GROUPS, pad_token=0)
    batch["old_logprobs"] = batch["sampler_logprobs"].copy()
    batch["old_logprobs"][0, 0] = 9.0
    fresh = drawn_under(1, GROUPS, 4)
    assert fresh.tolist() == batch["mask"].tolist()
    assert mismatch(batch, fresh) == 0.0
    batch["old_logprobs"][3, 2] -= 0.5
    assert mismatch(batch, fresh) == pytest.approx(0.5 / 8)
    assert mismatch(batch, drawn_under(2, GROUPS, 4)) is None


def test_minibatches_are_a_partition_in_order() -> None:
    parts = minibatches(experience(GROUPS, pad_token=0), 2)
    assert [part["lengths"].tolist() for part in parts] == [[4, 3], [4, 3]]
    uneven = minibatches(experience(GROUPS, pad_token=0), 3)
    assert [part["lengths"].tolist() for part in uneven] == [[4], [3], [4, 3]]


def test_padded_masks_only_responses() -> None:
    assert padded([((1, 2), (3,)), ((4,), ())], 0)["mask"].tolist() == [[False, False, True], [False, False, False]]


def training_batch(
    arrays: Arrays, groups: tuple[PromptGroup, ...], version: int, algorithm: AlgorithmSection = DEFAULTS
) -> tuple[Arrays, dict[str, float]]:
    """Return what the policy loss reads of scored arrays, and what both parts of it tell."""
    valued, watched = valued_batch(arrays, groups, algorithm)
    batch, measured = policy_batch(valued, groups, version, algorithm)
    return batch, watched | measured


TWO_STEPS = AlgorithmSection(minibatches=2)
STALE: dict[str, Any] = {"mode": "async", "max_staleness": 1}


def scored(algorithm: AlgorithmSection, ratio: float = 2.0) -> Arrays:
    """Return the experience of GROUPS whose trainer finds each token `ratio` times as likely as the sampler."""
    assert algorithm.scores_batch
    arrays = experience(GROUPS, 0)
    arrays["old_logprobs"] = (arrays["sampler_logprobs"] + np.log(ratio)).astype(np.float32)
    return arrays


def test_without_options_a_training_batch_is_the_scored_experience_and_minibatches_add_nothing() -> None:
    arrays = scored(TWO_STEPS)
    batch, measured = training_batch(arrays, GROUPS, 1, TWO_STEPS)
    assert set(batch) == {"tokens", "lengths", "mask", "advantages", "old_logprobs"}
    assert all(batch[name] is arrays[name] for name in arrays if name != "sampler_logprobs")
    assert measured == {"groups_equal": 1, "groups_single": 0, "mismatch": pytest.approx(np.log(2.0))}
    assert set(minibatches(batch, 2, TWO_STEPS)[0]) == set(batch)


@pytest.mark.parametrize(
    ("settings", "correction"),
    [
        ({}, None),
        ({"correction": "mask"}, "mask"),
        (STALE, "truncate"),
        ({**STALE, "correction": "none"}, "none"),
        ({**STALE, "correction": "truncate", "correction_cap": 1.5}, "truncate"),
    ],
)
def test_of_a_single_step_the_loss_computes_what_follows_from_the_trainers_log_probs(
    settings: dict[str, Any], correction: str | None
) -> None:
    algorithm = AlgorithmSection.model_validate(settings)
    assert not algorithm.scores_batch
    arrays = experience(GROUPS, 0)
    batch, measured = training_batch(arrays, GROUPS, 1, algorithm)
    assert set(batch) == {"tokens", "lengths", "mask", "advantages", "sampler_logprobs", "fresh"}
    assert batch["sampler_logprobs"] is arrays["sampler_logprobs"]
    assert (batch["fresh"].dtype, batch["fresh"].tolist()) == (np.float32, arrays["mask"].tolist())
    assert measured == {"groups_equal": 1, "groups_single": 0}
    assert not training_batch(arrays, GROUPS, 2, algorithm)[0]["fresh"].any()
    told = loss_settings(algorithm)
    assert told.first_step and told.correction == correction
    assert (told.correction_cap, told.correction_bounds) == (algorithm.correction_cap, algorithm.correction_bounds)


def test_groups_of_one_sample_are_warned_about_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    group = PromptGroup(Prompt("q", "a"), (5,), (sample((7,), (-0.5,)),), (1.0,))
    arrays = experience((group, *GROUPS), 0)
    with caplog.at_level(logging.WARNING):
        batch, measured = training_batch(arrays, (group, *GROUPS), 1)
    assert "1 of 3 groups have one sample" in caplog.text
    assert not batch["advantages"][0].any() and measured["groups_single"] == 1
    caplog.clear()
    batch, _ = training_batch(arrays, (group, *GROUPS), 1, AlgorithmSection(advantages="reinforce++"))
    assert batch["advantages"][0].any()
    assert "one sample" not in caplog.text


def test_each_kind_of_advantages_is_given_to_every_token() -> None:
    # Rewards 1, 0, 0 and 0 on 2, 1, 3 and 2 tokens. Of the batch: mean 1/4, squares 3/2 over 7.
    sigma = np.sqrt(1.5 / 7)
    # Less the means of the groups: 1/2, -1/2, 0 and 0; mean 1/16, squares 2 x 1/4 + 1/4 - 8 / 256, over 7.
    of_groups = np.sqrt((0.75 - 8 / 256) / 7)
    expected = {
        "rloo": [1.0, -1.0, 0.0, 0.0],
        "reinforce++": [0.75 / sigma, *[-0.25 / sigma] * 3],
        "reinforce++-baseline": [value / of_groups for value in (7 / 16, -9 / 16, -1 / 16, -1 / 16)],
    }
    for advantages, values in expected.items():
        algorithm = AlgorithmSection.model_validate({"advantages": advantages, "advantage_epsilon": 1e-9})
        arrays = experience(GROUPS, 0)
        batch, measured = training_batch(arrays, GROUPS, 1, algorithm)
        assert np.allclose(batch["advantages"], np.where(arrays["mask"], np.array(values)[:, None], 0.0)), advantages
        assert measured["groups_equal"] == 1


CUT = (
    replace(GROUPS[0], samples=(replaced(GROUPS[0].samples[0], finish_reason="length"), GROUPS[0].samples[1])),
    GROUPS[1],
)


@pytest.mark.parametrize("settings", [{}, {"minibatches": 2}, {**STALE, "minibatches": 2}])
def test_truncated_samples_are_not_trained_on_and_still_count_for_the_others(settings: dict[str, Any]) -> None:
    plain = AlgorithmSection.model_validate(settings)
    masking = AlgorithmSection.model_validate({**settings, "mask_truncated": True})
    arrays = scored(plain) if plain.scores_batch else experience(GROUPS, 0)
    batch, _ = training_batch(arrays, CUT, 1, plain)
    masked, _ = training_batch(arrays, CUT, 1, masking)
    assert not masked["mask"][0].any() and not any(masked[name][0].any() for name in masked if name == "fresh")
    for name in batch:
        assert masked[name][1:].tolist() == batch[name][1:].tolist(), name
    assert masked["lengths"].tolist() == [4, 3, 4, 3]


def test_truncated_samples_count_in_no_moment_and_no_mean_over_trained_tokens() -> None:
    settings = {"advantages": "reinforce++", "mask_truncated": True, "normalisation": "sequence-mean"}
    algorithm = AlgorithmSection.model_validate(settings)
    uneven = (replace(CUT[0], rewards=(9.0, 1.0)), CUT[1])
    arrays = experience(uneven, 0)
    # Rewards 1, 0 and 0 on 1, 3 and 2 tokens: mean 1/6, squares 5/6 over 5.
    batch, _ = training_batch(arrays, uneven, 1, algorithm)
    first = batch["advantages"][[1, 2, 3], [2, 1, 1]] * np.sqrt(1 / 6)
    assert first.tolist() == pytest.approx([5 / 6, -1 / 6, -1 / 6], abs=1e-5)
    (part,) = minibatches(batch, 1, algorithm)
    # 6 tokens of 3 samples: 6 / (3 |o|).
    assert part["token_weights"][part["mask"]].tolist() == pytest.approx([2.0, *[2 / 3] * 3, *[1.0] * 2])
    assert not part["token_weights"][0].any()


def test_a_batch_of_truncated_samples_alone_has_no_target_and_no_weights() -> None:
    algorithm = AlgorithmSection.model_validate({**STALE, "minibatches": 2, "mask_truncated": True})
    samples = tuple(replaced(sample, finish_reason="length") for sample in GROUPS[0].samples)
    batch, measured = training_batch(scored(algorithm), (replace(GROUPS[0], samples=samples),) * 2, 1, algorithm)
    assert not batch["mask"].any() and "importance_weights" not in batch
    assert all(np.isfinite(value) for value in measured.values())


def test_kl_in_the_reward_is_taken_off_before_the_advantages() -> None:
    algorithm = AlgorithmSection(kl_coefficient=0.5, kl_in="reward", kl_estimator="k1", advantage_std="none")
    arrays = scored(algorithm)
    arrays["reference_logprobs"] = np.where(arrays["mask"], arrays["old_logprobs"] - 1.0, np.nan).astype(np.float32)
    batch, measured = training_batch(arrays, GROUPS, 1, algorithm)
    # k1 is 1 per token: 2, 1, 3 and 2 tokens cost 1.0, 0.5, 1.5 and 1.0. Rewards are then 0, -0.5 and -1.5, -1.
    assert [row[mask].tolist() for row, mask in zip(batch["advantages"], batch["mask"], strict=True)] == [
        pytest.approx([0.25, 0.25]),
        pytest.approx([-0.25]),
        pytest.approx([-0.25] * 3),
        pytest.approx([0.25] * 2),
    ]
    assert not batch["advantages"][~batch["mask"]].any()
    assert measured["kl_penalty"] == pytest.approx(1.0)
    assert measured["groups_equal"] == 0


def test_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    algorithm = AlgorithmSection(kl_coefficient=0.5, minibatches=2)
    arrays = scored(algorithm)
    arrays["reference_logprobs"] = arrays["old_logprobs"] - np.float32(1.0)
    batch, measured = training_batch(arrays, GROUPS, 1, algorithm)
    del arrays["reference_logprobs"]
    assert (batch["advantages"] == training_batch(arrays, GROUPS, 1, algorithm)[0]["advantages"]).all()
    assert "reference_logprobs" in batch
    assert "kl_penalty" not in measured


@pytest.mark.parametrize(
    ("correction", "weight", "cut"), [("truncate", 1.5, 1.0), ("mask", 0.0, 1.0), ("none", None, 0.0)]
)
def test_a_correction_weighs_what_the_engines_disagree_on(correction: str, weight: float | None, cut: float) -> None:
    algorithm = AlgorithmSection.model_validate(
        {"correction": correction, "correction_cap": 1.5, "correction_bounds": [0.5, 1.9], "epochs": 2}
    )
    batch, measured = training_batch(scored(algorithm), GROUPS, 1, algorithm)
    assert ("importance_weights" in batch) == (weight is not None)
    if weight is not None:
        assert batch["importance_weights"][batch["mask"]].tolist() == pytest.approx([weight] * 8)
        assert (measured["importance_weight"], measured["importance_cut"]) == (pytest.approx(weight), cut)


@pytest.mark.parametrize(("settings", "weight", "cut"), [({}, 2.0, 1.0), ({"correction": "none"}, 3.0, 0.0)])
def test_stale_samples_are_weighed_when_decoupled_at_most_twice_unless_one_says_none(
    settings: dict[str, Any], weight: float, cut: float
) -> None:
    decoupled = AlgorithmSection.model_validate({**STALE, "minibatches": 2, **settings})
    arrays = scored(decoupled, ratio=3.0)
    batch, measured = training_batch(arrays, GROUPS, 1, decoupled)
    assert batch["importance_weights"][batch["mask"]].tolist() == pytest.approx([weight] * 8)
    assert batch["old_logprobs"] is arrays["old_logprobs"]
    assert (measured["importance_weight"], measured["importance_cut"]) == (pytest.approx(weight), cut)


def test_stale_samples_are_clipped_against_their_sampler_when_coupled() -> None:
    coupled = AlgorithmSection(**STALE, objective="coupled", minibatches=2)
    assert not coupled.scores_batch
    arrays = experience(GROUPS, 0)
    batch, _ = training_batch(arrays, GROUPS, 1, coupled)
    assert batch["old_logprobs"] is batch["sampler_logprobs"] is arrays["sampler_logprobs"]
    assert "importance_weights" not in batch
    settings = loss_settings(coupled)
    assert not settings.first_step and settings.correction is None


@pytest.mark.parametrize("objective", ["coupled", "decoupled"])
def test_async_without_staleness_is_the_synchronous_batch(objective: str) -> None:
    algorithm = AlgorithmSection.model_validate({"mode": "async", "objective": objective, "minibatches": 2})
    arrays = scored(algorithm)
    batch, _ = training_batch(arrays, GROUPS, 1, algorithm)
    assert set(batch) == {"tokens", "lengths", "mask", "advantages", "old_logprobs"}
    assert batch["old_logprobs"] is arrays["old_logprobs"]


MASK = np.array([[False, True, True, True], [False, True, False, False], [False, False, False, False]])


def test_token_weights_by_hand() -> None:
    # 4 targets; 2 samples have one. 4 / (2 * 3) for each of the three, 4 / (2 * 1) for the single one.
    assert token_weights(MASK, None).tolist() == [
        [0.0, pytest.approx(2 / 3), pytest.approx(2 / 3), pytest.approx(2 / 3)],
        [0.0, 2.0, 0.0, 0.0],
        [0.0] * 4,
    ]
    # 4 / (2 * 8) for every target.
    assert token_weights(MASK, 8).tolist() == [[0.0, 0.25, 0.25, 0.25], [0.0, 0.25, 0.0, 0.0], [0.0] * 4]


def test_each_minibatch_is_weighed_by_its_own_counts() -> None:
    algorithm = AlgorithmSection(normalisation="sequence-mean")
    first, second = minibatches(experience(GROUPS, 0), 2, algorithm)
    # Responses of 2 and 1 tokens: 3 / (2 * 2) and 3 / (2 * 1); then 3 and 2: 5 / (2 * 3) and 5 / (2 * 2).
    assert first["token_weights"][first["mask"]].tolist() == pytest.approx([0.75, 0.75, 1.5])
    assert second["token_weights"][second["mask"]].tolist() == pytest.approx([5 / 6] * 3 + [1.25] * 2)
    for part in (first, second):
        assert part["token_weights"].dtype == np.float32
        assert part["token_weights"].sum() == pytest.approx(part["mask"].sum())


def test_the_mean_over_groups_counts_samples() -> None:
    assert mean_of(group.rewards for group in GROUPS) == 0.25


def test_sampling_seeds_depend_on_everything_and_fit_31_bits() -> None:
    seeds = {seed_of(seed, stream, number) for seed in range(3) for stream in ("a", "b") for number in range(50)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(0, "step 1", 2) == seed_of(0, "step 1", 2)
