"""The optional terms of the losses: dual clip, KL, entropy, weights, value clip; values by hand, gradients checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime.rl import losses
from tests.engines.rl.loss_calls import policy_loss

# One token per column, clip between 0.8 and 1.3, dual clip at 3.
RATIOS = [5.0, 5.0, 2.5, 1.1, 0.5, 0.5]
ADVANTAGES = [2.0, -2.0, -2.0, -2.0, -2.0, 2.0]
SURROGATES = [2.6, -6.0, -5.0, -2.2, -1.6, 1.0]
SLOPES = [0.0, 0.0, -5.0, -2.2, 0.0, 1.0]  # d surrogate / d logprob: ratio x advantage, 0 where a bound holds
CLIPS: dict[str, float] = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}


def row(*values: float, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=requires_grad)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logprobs that carry a gradient, old log-probs, and the mask of the columns above."""
    old = row(*[-1.0] * 6)
    return (old + row(*RATIOS).log()).requires_grad_(), old, torch.ones(1, 6, dtype=torch.bool)


def gradient_of(loss: torch.Tensor, of: torch.Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss, of)
    values: list[float] = gradient[0].tolist()
    return values


def test_the_dual_clip_holds_a_negative_advantage_alone() -> None:
    logprobs, old, mask = tokens()
    loss, sums = policy_loss(logprobs, mask, old_logprobs=old, advantages=row(*ADVANTAGES), **CLIPS)
    assert float(loss.detach()) == pytest.approx(-sum(SURROGATES))
    assert gradient_of(loss, logprobs) == pytest.approx([-slope for slope in SLOPES])
    assert (float(sums["clip_fraction"]), float(sums["dual_clip_fraction"])) == (2.0, 1.0)


def test_weights_multiply_value_and_gradient_and_carry_none() -> None:
    logprobs, old, mask = tokens()
    importance = row(1.0, 2.0, 0.5, 3.0, 1.0, 0.0, requires_grad=False)
    weights = row(0.5, 1.0, 2.0, 1.0, 4.0, 1.0)
    loss, sums = policy_loss(
        logprobs,
        mask,
        old_logprobs=old,
        advantages=row(*ADVANTAGES),
        importance_weights=importance,
        token_weights=weights,
        **CLIPS,
    )
    both = (importance * weights)[0].tolist()
    assert float(loss.detach()) == pytest.approx(-sum(w * s for w, s in zip(both, SURROGATES, strict=True)))
    assert gradient_of(loss, logprobs) == pytest.approx([-w * s for w, s in zip(both, SLOPES, strict=True)])
    assert float(sums["ratio"]) == pytest.approx(sum(RATIOS))


def test_importance_weighs_the_surrogate_and_not_the_kl() -> None:
    logprobs, reference = row(-1.0, -1.0), row(-1.5, -0.5)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = policy_loss(
        logprobs,
        mask,
        old_logprobs=logprobs,
        advantages=row(1.0, 1.0),
        importance_weights=row(0.0, 0.0),
        reference_logprobs=reference,
        kl_coefficient=2.0,
        kl_estimator="k2",
    )
    assert float(loss) == pytest.approx(2.0 * (0.125 + 0.125))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 1.5])
def test_the_decoupled_objective_is_that_of_its_paper(advantage: float, ratio: float) -> None:
    # (pi_prox / pi_behav) min(u A, clip(u, 0.8, 1.2) A) with u = pi / pi_prox and pi_prox / pi_behav = 2.
    behaviour = row(-2.0)
    proximal = behaviour + torch.tensor(2.0).log()
    logprobs = (proximal + torch.tensor(ratio).log()).requires_grad_()
    loss, _ = policy_loss(
        logprobs,
        torch.ones(1, 1, dtype=torch.bool),
        old_logprobs=proximal,
        advantages=row(advantage),
        importance_weights=(proximal - behaviour).exp(),
    )
    bounded = min(max(ratio, 0.8), 1.2)
    assert float(loss.detach()) == pytest.approx(-2.0 * min(ratio * advantage, bounded * advantage))
    free = (ratio < 1.2) if advantage > 0 else (ratio > 0.8)
    assert gradient_of(loss, logprobs) == pytest.approx([-2.0 * ratio * advantage if free else 0.0], rel=1e-6)


# d = reference - logprob is -0.5 and 1; the gradients are those of k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.
KL = {
    "k1": ([0.5, -1.0], [1.0, 1.0]),
    "k2": ([0.125, 0.5], [0.5, -1.0]),
    "k3": ([0.1065306597, 0.7182818285], [0.3934693403, -1.7182818285]),
}


@pytest.mark.parametrize("estimator", KL)
def test_each_kl_term_by_hand(estimator: str) -> None:
    values, slopes = KL[estimator]
    logprobs = row(-1.0, -2.0, requires_grad=True)
    loss, sums = policy_loss(
        logprobs,
        torch.ones(1, 2, dtype=torch.bool),
        old_logprobs=logprobs.detach(),
        advantages=row(0.0, 0.0),
        reference_logprobs=row(-1.5, -1.0),
        kl_coefficient=0.1,
        kl_estimator=estimator,
    )
    assert float(loss.detach()) == pytest.approx(0.1 * sum(values))
    assert float(sums["kl"]) == pytest.approx(sum(values))
    assert gradient_of(loss, logprobs) == pytest.approx([0.1 * slope for slope in slopes])


def test_the_gradient_of_k2_is_that_of_the_divergence_on_average_and_k1s_is_zero() -> None:
    logits = row(0.3, -0.2, 0.9, requires_grad=True)
    reference = row(-0.5, 0.4, 0.1).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = gradient_of((logprobs.exp() * (logprobs - reference)).sum(), logits)
    average = {}
    for estimator in ("k1", "k2"):
        loss, _ = policy_loss(
            logits.log_softmax(-1),
            torch.ones(1, 3, dtype=torch.bool),
            old_logprobs=logprobs.detach(),
            advantages=torch.zeros_like(reference),
            reference_logprobs=reference,
            kl_coefficient=1.0,
            kl_estimator=estimator,
            token_weights=logprobs.detach().exp(),  # one token per outcome, weighed by its probability
        )
        average[estimator] = gradient_of(loss, logits)
    assert average["k2"] == pytest.approx(exact)
    assert average["k1"] == pytest.approx([0.0] * 3, abs=1e-12)


def test_the_entropy_bonus_raises_the_entropy() -> None:
    logits = torch.tensor([[[0.3, -0.2, 0.9], [2.0, 0.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    mask = torch.tensor([[True, False]])
    loss, sums = policy_loss(
        logprobs[..., 0].detach(),
        mask,
        old_logprobs=logprobs[..., 0].detach(),
        advantages=torch.zeros(1, 2, dtype=torch.float64),
        entropy=entropy,
        entropy_coefficient=0.5,
    )
    first = logprobs[0, 0].detach()
    probabilities, expected = first.exp(), -(first.exp() * first).sum()
    assert float(loss.detach()) == pytest.approx(-0.5 * float(expected))
    assert float(sums["entropy"]) == pytest.approx(float(expected))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient[0, 0], 0.5 * probabilities * (first + expected))
    assert not gradient[0, 1].any()


@pytest.mark.parametrize("entropy", [None, row(0.5)])
def test_an_entropy_bonus_without_a_gradient_is_refused(entropy: torch.Tensor | None) -> None:
    logprobs, mask = row(-1.0), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(HetrlError, match="entropy_coefficient needs an entropy with a gradient"):
        policy_loss(
            logprobs, mask, old_logprobs=logprobs, advantages=logprobs, entropy=entropy, entropy_coefficient=0.1
        )


def test_all_terms_together_have_the_gradient_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    old, reference, importance, weights = (torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(4))
    advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    start = (old + torch.randn(3, 5, generator=generator, dtype=torch.float64)).requires_grad_()

    def loss_of(logprobs: torch.Tensor, **options: Any) -> torch.Tensor:
        return policy_loss(
            logprobs,
            mask,
            old_logprobs=old,
            advantages=advantages,
            reference_logprobs=reference,
            importance_weights=importance,
            token_weights=weights,
            entropy=logprobs**2,
            entropy_coefficient=0.2,
            kl_coefficient=0.3,
            dual_clip=1.5,
            **options,
        )[0]

    for estimator in KL:
        assert torch.autograd.gradcheck(lambda x, name=estimator: loss_of(x, kl_estimator=name), (start,))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("difference", [200.0, -200.0])
def test_a_huge_difference_of_log_probs_leaves_value_and_gradient_finite(advantage: float, difference: float) -> None:
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    old = logprobs.detach() - difference
    loss, _ = policy_loss(
        logprobs,
        torch.ones(1, 1, dtype=torch.bool),
        old_logprobs=old,
        advantages=torch.tensor([[advantage]]),
        reference_logprobs=old,
        kl_coefficient=0.1,
    )
    assert torch.isfinite(loss)
    assert all(torch.isfinite(torch.tensor(gradient_of(loss, logprobs))))


def test_the_value_loss_is_clipped_around_the_old_value_on_both_sides() -> None:
    # V_old 1, clip 0.5. Errors without and with the clip, squared:
    # V 2.0, R 3: 1 and 2.25;  V 2.0, R 1: 1 and 0.25;  V 0.0, R -1: 1 and 2.25;  V 1.25, R 0: 1.5625 twice.
    values, returns = row(2.0, 2.0, 0.0, 1.25, requires_grad=True), row(3.0, 1.0, -1.0, 0.0)
    mask, old = torch.ones(1, 4, dtype=torch.bool), row(1.0, 1.0, 1.0, 1.0)
    loss, sums = losses.value_loss(values, mask, old_values=old, returns=returns, clip=0.5)
    assert float(loss.detach()) == pytest.approx((2.25 + 1.0 + 2.25 + 1.5625) / 2)
    assert float(sums["value_clip_fraction"]) == 2.0
    assert gradient_of(loss, values) == pytest.approx([0.0, 1.0, 0.0, 1.25])


def test_the_value_loss_without_clip_is_half_the_squared_error_of_the_targets() -> None:
    values, mask = row(1.0, 5.0, 2.0, requires_grad=True), torch.tensor([[True, False, True]])
    poison = float("nan")
    loss, sums = losses.value_loss(
        values,
        mask,
        old_values=row(poison, poison, poison),
        returns=row(3.0, poison, 1.0),
        token_weights=row(1.0, poison, 3.0),
    )
    assert float(loss.detach()) == pytest.approx((4.0 + 3.0) / 2)
    assert gradient_of(loss, values) == pytest.approx([-2.0, 0.0, 3.0])
    assert sums == {}
