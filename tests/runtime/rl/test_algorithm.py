"""The algorithm section: what it becomes for the loss, and which combinations it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.runtime.rl.experience import loss_settings
from hetrl.runtime.wire import LossSettings


def test_the_defaults_are_plain_grpo_in_one_step() -> None:
    assert loss_settings(AlgorithmSection()) == LossSettings(
        loss="policy",
        learning_rate=1e-6,
        temperature=1.0,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        kl_coefficient=0.0,
        kl_estimator="k3",
        entropy_coefficient=0.0,
        first_step=True,
    )
    assert loss_settings(AlgorithmSection(minibatches=2)) == LossSettings(learning_rate=1e-6)


def test_what_is_set_reaches_the_loss() -> None:
    settings: dict[str, Any] = {
        "learning_rate": 0.5,
        "temperature": 0.7,
        "clip_low": 0.1,
        "clip_high": 0.28,
        "kl_coefficient": 0.02,
        "kl_estimator": "k2",
        "entropy_coefficient": 0.01,
        "dual_clip": 3.0,
        "ratio": "sequence",
    }
    assert loss_settings(AlgorithmSection(**settings, epochs=2)) == LossSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "scores"),
    [
        ({}, False),
        ({"minibatches": 2}, True),
        ({"epochs": 2}, True),
        ({"correction": "truncate"}, False),
        ({"mode": "async", "max_staleness": 1}, False),
        ({"mode": "async", "max_staleness": 1, "minibatches": 2}, True),
        ({"mode": "async", "max_staleness": 1, "minibatches": 2, "objective": "coupled"}, False),
        ({"mode": "async", "minibatches": 2, "objective": "coupled"}, True),  # the same where nothing is stale
        ({"kl_coefficient": 0.1}, False),
        ({"kl_coefficient": 0.1, "kl_in": "reward"}, True),
        ({"kl_in": "reward"}, False),
    ],
)
def test_a_batch_is_scored_only_where_that_is_needed(settings: dict[str, Any], scores: bool) -> None:
    assert AlgorithmSection.model_validate(settings).scores_batch == scores


@pytest.mark.parametrize(
    ("settings", "renews"),
    [
        ({}, True),
        ({"mode": "async", "max_staleness": 1}, True),
        ({"mode": "async", "max_staleness": 1, "on_update": "continue"}, False),
        ({"mode": "async", "on_update": "continue"}, True),
        ({"on_update": "continue"}, True),  # a prompt that comes again would have keys and values of other weights
    ],
)
def test_contexts_stay_those_of_older_weights_only_where_samples_may_be_stale(
    settings: dict[str, Any], renews: bool
) -> None:
    assert AlgorithmSection.model_validate(settings).renews_contexts == renews


def test_kl_counts_in_the_loss_or_in_the_reward_never_in_both() -> None:
    assert loss_settings(AlgorithmSection(kl_coefficient=0.1, kl_in="loss")).kl_coefficient == 0.1
    assert loss_settings(AlgorithmSection(kl_coefficient=0.1, kl_in="reward")).kl_coefficient == 0.0
    with pytest.raises(ValidationError, match="'loss' or 'reward'"):
        AlgorithmSection.model_validate({"kl_in": ["loss", "reward"]})


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({}, "none"),
        ({"mode": "async"}, "none"),
        ({"mode": "async", "max_staleness": 1}, "truncate"),
        ({"mode": "async", "max_staleness": 1, "correction": "none"}, "none"),
        ({"mode": "async", "max_staleness": 1, "correction": "mask"}, "mask"),
        ({"mode": "async", "max_staleness": 1, "objective": "coupled"}, "none"),
    ],
)
def test_the_weights_of_stale_samples_are_truncated_unless_one_says_otherwise(
    settings: dict[str, Any], bound: str
) -> None:
    assert AlgorithmSection.model_validate(settings).importance_bound == bound


STALE: dict[str, Any] = {"mode": "async", "max_staleness": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalisation": "constant"}, "normalisation_tokens goes with normalisation constant"),
        ({"normalisation_tokens": 5}, "normalisation_tokens goes with normalisation constant"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"correction_cap": 0.5}, "greater than or equal to 1"),
        ({"correction_bounds": [1.5, 2.0]}, "low <= 1 <= high"),
        ({"correction_bounds": [0.1, 0.9]}, "low <= 1 <= high"),
        ({"correction": "mask", "objective": "coupled", **STALE}, "set correction none or objective decoupled"),
        ({"dynamic_sampling": {"max_draws": 1}}, "greater than or equal to 2"),
        ({"dynamic_sampling": {"max_draws": 2}, "samples_per_prompt": 1}, "raise samples_per_prompt"),
        ({"samples_per_prompt": 1}, "advantages grpo compares the samples of a prompt, and one alone has none"),
        ({"samples_per_prompt": 1, "advantages": "rloo"}, "or set advantages reinforce++"),
        ({"advantages": "rloo", "advantage_std": "none"}, "advantage_std is for advantages grpo, not for rloo"),
        ({"advantages": "gae"}, "'reinforce\\+\\+' or"),
        ({"ratio": "sample"}, "'token' or 'sequence'"),
        ({"max_staleness": 1}, "max_staleness is for mode async"),
        ({"kl_estimator": "k4"}, "'k1', 'k2' or 'k3'"),
    ],
)
def test_a_wrong_combination_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmSection.model_validate(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"normalisation": "constant", "normalisation_tokens": 5},
        {"correction": "mask", "objective": "coupled"},
        {"correction": "truncate", **STALE},
        {"objective": "coupled", **STALE},
        {"advantages": "grpo", "advantage_std": "batch"},
    ],
)
def test_a_right_combination_is_taken(settings: dict[str, Any]) -> None:
    algorithm = AlgorithmSection.model_validate(settings)
    assert {name: getattr(algorithm, name) for name in settings} == settings
