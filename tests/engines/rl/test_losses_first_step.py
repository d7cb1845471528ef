"""The loss of the only step after the weights that the ratio is to: it needs no log-probs from a pass beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime.rl import losses
from hetrl.runtime.rl.divergence import importance_weights
from hetrl.runtime.wire import LossSettings
from tests.engines.rl.loss_calls import policy_loss

GENERATOR = torch.Generator().manual_seed(7)
LOGPROBS, REFERENCE, ADVANTAGES, NOISE, WEIGHTS = (
    torch.randn(4, 6, generator=GENERATOR, dtype=torch.float64) for _ in range(5)
)
SAMPLER = LOGPROBS + 0.8 * NOISE
MASK = torch.rand(4, 6, generator=GENERATOR) < 0.6
EVERYTHING: dict[str, Any] = {
    "advantages": ADVANTAGES,
    "reference_logprobs": REFERENCE,
    "token_weights": WEIGHTS.abs(),
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.2,
    "dual_clip": 1.5,
    "clip_high": 0.3,
}


def loss_and_gradient(**options: Any) -> tuple[float, list[list[float]], losses.Sums]:
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, sums = policy_loss(logprobs, MASK, entropy=logprobs**2, **{**EVERYTHING, **options})
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist(), sums


def test_value_gradient_and_metrics_are_those_with_the_log_probs_of_a_pass() -> None:
    value, gradient, sums = loss_and_gradient(first_step=True)
    scored_value, scored_gradient, scored_sums = loss_and_gradient(old_logprobs=LOGPROBS)
    assert value == scored_value and gradient == scored_gradient
    assert {name: float(one) for name, one in sums.items()} == {name: float(one) for name, one in scored_sums.items()}
    assert float(sums["ratio"]) == int(MASK.sum()) and float(sums["logprob_difference"]) == 0.0


@pytest.mark.parametrize("bound", ["none", "truncate", "mask"])
def test_weights_against_the_sampler_are_those_that_the_log_probs_of_a_pass_give(bound: str) -> None:
    limits: dict[str, Any] = {"cap": 1.3, "bounds": (0.7, 1.6)}
    weights, cut = importance_weights(LOGPROBS.numpy(), SAMPLER.numpy(), MASK.numpy(), bound=bound, **limits)
    assert (cut > 0) == (bound != "none")
    scored_value, scored_gradient, _ = loss_and_gradient(
        old_logprobs=LOGPROBS, importance_weights=torch.from_numpy(weights).double()
    )
    value, gradient, sums = loss_and_gradient(
        first_step=True,
        sampler_logprobs=SAMPLER,
        correction=bound,
        correction_cap=limits["cap"],
        correction_bounds=limits["bounds"],
    )
    assert value == pytest.approx(scored_value, rel=1e-6)
    assert np.array(gradient) == pytest.approx(np.array(scored_gradient), rel=1e-6)
    tokens = int(MASK.sum())
    assert float(sums["importance_weight"]) / tokens == pytest.approx(float(weights[MASK.numpy()].mean()), rel=1e-6)
    assert float(sums["importance_cut"]) / tokens == pytest.approx(cut)


def test_the_mismatch_counts_fresh_tokens_alone_and_changes_no_gradient() -> None:
    fresh = (torch.arange(6) < 4).double().expand(4, 6)
    value, gradient, sums = loss_and_gradient(first_step=True, sampler_logprobs=SAMPLER, fresh=fresh)
    counted = MASK & (fresh > 0)
    assert float(sums["fresh"]) == int(counted.sum())
    assert float(sums["mismatch"]) == pytest.approx(float((SAMPLER - LOGPROBS)[counted].abs().sum()))
    assert (value, gradient) == loss_and_gradient(first_step=True)[:2]


def test_what_lies_outside_the_mask_changes_nothing() -> None:
    results = []
    for poison in (0.0, float("nan"), float("inf")):
        sampler, fresh = (torch.where(MASK, values, poison) for values in (SAMPLER, torch.ones_like(SAMPLER)))
        options = {"sampler_logprobs": sampler, "fresh": fresh, "correction": "truncate"}
        value, gradient, sums = loss_and_gradient(first_step=True, **options)
        results.append((value, gradient, {name: float(one) for name, one in sums.items()}))
    assert results[0] == results[1] == results[2]
    assert set(results[0][2]) <= set(losses.METRICS)


@pytest.mark.parametrize(
    ("settings", "extras", "message"),
    [
        ({"first_step": True}, ["advantages", "old_logprobs"], "in a first_step old_logprobs are its own"),
        ({"first_step": True}, [], 'no "advantages"'),
        ({"first_step": True, "correction": "none"}, ["advantages"], 'no "sampler_logprobs"'),
        ({"first_step": True}, ["advantages", "fresh"], 'no "sampler_logprobs"'),
        ({"first_step": True, "correction": "clip"}, ["advantages"], '"clip" is not one of none, truncate, mask'),
        ({"loss": "supervised", "first_step": True}, [], 'unknown hyper-parameter "first_step"'),
    ],
)
def test_a_wrong_request_is_refused(settings: dict[str, Any], extras: list[str], message: str) -> None:
    with pytest.raises(HetrlError, match=message):
        losses.check(LossSettings(**settings), dict.fromkeys(extras))
    losses.check(LossSettings(first_step=True, correction="mask"), dict.fromkeys(["advantages", "sampler_logprobs"]))
