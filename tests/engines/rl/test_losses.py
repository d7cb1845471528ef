from __future__ import annotations

from typing import Any

import msgspec
import numpy
import pytest
import torch

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.errors import HetrlError
from hetrl.runtime.rl import losses
from hetrl.runtime.rl.experience import loss_settings
from hetrl.runtime.wire import LossSettings
from tests.engines.rl.loss_calls import ARRAYS, policy_loss

# One token per column: ratio, advantage, and what the clip between 0.8 and 1.3 leaves of it.
RATIOS = [0.5, 0.5, 1.0, 1.1, 1.5, 1.5]
ADVANTAGES = [2.0, -2.0, 3.0, -1.0, 2.0, -2.0]
SURROGATES = [1.0, -1.6, 3.0, -1.1, 2.6, -3.0]
CLIPPED = [False, True, False, False, True, False]


def tensors(*rows: list[float]) -> list[torch.Tensor]:
    return [torch.tensor([row], dtype=torch.float64) for row in rows]


def test_the_surrogate_is_clipped_on_both_sides_with_separate_bounds() -> None:
    old, advantages = tensors([-1.0] * 6, ADVANTAGES)
    logprobs = old + torch.tensor([RATIOS], dtype=torch.float64).log()
    mask = torch.ones(1, 6, dtype=torch.bool)
    loss, sums = policy_loss(logprobs, mask, old_logprobs=old, advantages=advantages, clip_low=0.2, clip_high=0.3)
    assert float(loss) == pytest.approx(-sum(SURROGATES))
    assert float(sums["ratio"]) == pytest.approx(sum(RATIOS))
    assert float(sums["clip_fraction"]) == sum(CLIPPED)
    assert float(sums["logprob_difference"]) == pytest.approx(numpy.abs(numpy.log(RATIOS)).sum())


def test_the_gradient_of_a_clipped_token_is_zero_and_of_another_minus_ratio_times_advantage() -> None:
    old, advantages = tensors([-1.0] * 6, ADVANTAGES)
    logprobs = (old + torch.tensor([RATIOS], dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones(1, 6, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, mask, old_logprobs=old, advantages=advantages, clip_low=0.2, clip_high=0.3)
    loss.backward()
    expected = [0.0 if c else -r * a for r, a, c in zip(RATIOS, ADVANTAGES, CLIPPED, strict=True)]
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx(expected)


def test_the_kl_term_is_k3_times_its_coefficient() -> None:
    logprobs, reference = tensors([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5])
    zeros, mask = torch.zeros_like(logprobs), torch.ones(1, 3, dtype=torch.bool)
    loss, sums = policy_loss(
        logprobs,
        mask,
        old_logprobs=logprobs,
        advantages=zeros,
        kl_coefficient=0.1,
        reference_logprobs=reference,
    )
    distance = (reference - logprobs).numpy()
    k3 = float((numpy.exp(distance) - distance - 1.0).sum())
    assert float(sums["kl"]) == pytest.approx(k3)
    assert float(loss) == pytest.approx(0.1 * k3)


def test_a_reference_without_coefficient_is_a_metric_alone() -> None:
    logprobs, reference = tensors([-1.0], [-1.5])
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, sums = policy_loss(
        logprobs, mask, old_logprobs=logprobs, advantages=torch.zeros_like(logprobs), reference_logprobs=reference
    )
    assert float(loss) == 0.0
    assert float(sums["kl"]) > 0.0


def test_what_lies_outside_the_mask_changes_neither_sums_nor_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 5, generator=generator) for _ in range(4)]
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 1, 1, 0]], dtype=torch.bool)
    results = []
    for poison in (0.0, float("nan"), float("inf")):
        logprobs, old, advantages, reference = (torch.where(mask, value, poison) for value in values)
        logprobs.requires_grad_()
        loss, sums = policy_loss(
            logprobs,
            mask,
            old_logprobs=old,
            advantages=advantages,
            kl_coefficient=0.5,
            reference_logprobs=reference,
            entropy=reference,
        )
        loss.backward()
        assert logprobs.grad is not None
        results.append((loss.item(), {name: value.item() for name, value in sums.items()}, logprobs.grad.tolist()))
    assert results[0] == results[1] == results[2]
    assert set(results[0][1]) == {"ratio", "clip_fraction", "logprob_difference", "kl", "entropy"}


def test_sums_over_the_parts_of_a_batch_are_the_sum_over_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logprobs, old, advantages = (torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 4, generator=generator) < 0.6

    def loss_of(rows: slice) -> float:
        loss, _ = policy_loss(logprobs[rows], mask[rows], old_logprobs=old[rows], advantages=advantages[rows])
        return float(loss)

    assert loss_of(slice(0, 2)) + loss_of(slice(2, 6)) == pytest.approx(loss_of(slice(0, 6)))


def test_supervised_loss_is_the_negative_log_likelihood_of_the_targets() -> None:
    (logprobs,) = tensors([-1.0, -2.0, -4.0])
    mask = torch.tensor([[False, True, True]])
    loss, sums = losses.supervised_loss(logprobs, mask, entropy=-logprobs)
    assert float(loss) == 6.0
    assert float(sums["entropy"]) == 6.0


@pytest.mark.parametrize(
    ("loss", "extras", "coefficients", "message"),
    [
        ("polcy", {}, {}, 'unknown loss "polcy"'),
        ("policy", {"advantages": 0}, {}, 'no "old_logprobs"'),
        ("policy", {"advantages": 0, "old_logprobs": 0}, {"kl_coefficient": 0.1}, 'no "reference_logprobs"'),
        ("policy", {"advantages": 0, "old_logprobs": 0}, {"kl_estimator": "k4"}, '"k4" is not one of k1, k2, k3'),
        ("policy", {"advantages": 0, "old_logprobs": 0}, {"ratio": "sample"}, '"sample" is not one of token, sequence'),
        ("policy", {"advantages": 0, "old_logprobs": 0}, {"dual_clip": 1.0}, "dual_clip is 1.0; it must be above 1"),
        ("supervised", {}, {"clip_low": 0.1}, 'unknown hyper-parameter "clip_low"'),
    ],
)
def test_a_wrong_request_is_refused_by_name(
    loss: str, extras: dict[str, object], coefficients: dict[str, Any], message: str
) -> None:
    with pytest.raises(HetrlError, match=message):
        losses.check(LossSettings(loss=loss, **coefficients), extras)


@pytest.mark.parametrize(
    ("sent", "message"), [({"clip": 0.1}, "unknown field `clip`"), ({"clip_low": "x"}, "clip_low")]
)
def test_settings_that_are_none_are_refused_when_they_arrive(sent: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=LossSettings)


def test_evaluate_passes_every_option_and_every_array_on() -> None:
    generator = torch.Generator().manual_seed(2)
    logprobs, *rest = (torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(7))
    mask = torch.ones(8, 8, dtype=torch.bool)
    extras = dict(zip(ARRAYS, rest, strict=False))
    entropy = rest[5].requires_grad_()
    coefficients: dict[str, Any] = {
        "ratio": "sequence",
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": 1.2,
        "kl_coefficient": 0.5,
        "kl_estimator": "k2",
        "entropy_coefficient": 0.3,
    }
    losses.check(LossSettings(**coefficients, learning_rate=1.0, temperature=1.0), extras)
    direct, _ = policy_loss(logprobs, mask, entropy=entropy, **extras, **coefficients)

    def evaluated(**changed: Any) -> float:
        settings = LossSettings(**{**coefficients, **changed})
        return float(losses.evaluate(logprobs, mask, extras, settings, entropy)[0].detach())

    assert evaluated(learning_rate=1.0) == float(direct.detach())
    others: dict[str, Any] = {**dict.fromkeys(coefficients, 2.0), "kl_estimator": "k1", "ratio": "token"}
    assert len({evaluated(), *(evaluated(**{name: value}) for name, value in others.items())}) == 1 + len(others)


def test_the_defaults_of_the_algorithm_are_the_defaults_of_the_loss() -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs, old, advantages = (torch.randn(2, 3, generator=generator) for _ in range(3))
    mask, extras = torch.ones(2, 3, dtype=torch.bool), {"old_logprobs": old, "advantages": advantages}
    settings = loss_settings(AlgorithmSection(minibatches=2))
    losses.check(settings, extras)
    with_settings, _ = losses.evaluate(logprobs, mask, extras, settings)
    plain, _ = policy_loss(logprobs, mask, **extras)
    assert torch.equal(with_settings, plain)
