"""The ratio of a whole sequence: value, gradient and clip are those of GSPO, and no cut or padding changes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetrl.describe.algorithm import AlgorithmSection
from hetrl.runtime.rl import losses
from hetrl.runtime.rl.experience import minibatches
from tests.engines.rl.loss_calls import policy_loss

GENERATOR = torch.Generator().manual_seed(11)
OLD, NOISE = (torch.randn(5, 6, generator=GENERATOR, dtype=torch.float64) for _ in range(2))
MASK = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0] * 6]).bool()
ADVANTAGES = torch.tensor([[1.5], [-1.0], [2.0], [-0.5], [3.0]], dtype=torch.float64).expand(5, 6)
CLIPS = {"clip_low": 0.1, "clip_high": 0.2}
WEIGHTS = torch.from_numpy(
    minibatches({"tokens": MASK.numpy(), "mask": MASK.numpy()}, 1, AlgorithmSection(normalisation="sequence-mean"))[0][
        "token_weights"
    ]
)


def loss_of(logprobs: torch.Tensor, rows: slice = slice(None), **options: Any) -> tuple[torch.Tensor, losses.Sums]:
    return policy_loss(
        logprobs[rows],
        MASK[rows],
        **{"old_logprobs": OLD[rows], "advantages": ADVANTAGES[rows], "ratio": "sequence", **CLIPS, **options},
    )


def gradient(loss: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
    return found


def start() -> torch.Tensor:
    return (OLD + 0.3 * NOISE).requires_grad_()


def sequence_ratios(logprobs: torch.Tensor) -> torch.Tensor:
    """Return exp of the mean over the response of log(pi / pi_old), [b]; arXiv 2507.18071, equation 7."""
    lengths = MASK.sum(1).clamp(min=1)
    return ((torch.where(MASK, logprobs - OLD, 0.0)).sum(1) / lengths).exp()


def test_with_a_mean_over_sequences_value_and_gradient_are_those_of_gspo() -> None:
    logprobs = start()
    loss, sums = loss_of(logprobs, token_weights=WEIGHTS)
    ratios, advantages = sequence_ratios(logprobs), ADVANTAGES[:, 0]
    surrogates = torch.minimum(ratios * advantages, ratios.clamp(0.9, 1.2) * advantages)[:4]  # the last has no target
    expected = -surrogates.mean()  # equation 5
    tokens = int(MASK.sum())
    assert float(loss) / tokens == pytest.approx(float(expected))
    assert torch.allclose(gradient(loss, logprobs) / tokens, gradient(expected, logprobs))
    assert float(sums["ratio"]) == pytest.approx(float((ratios * MASK.sum(1)).sum()))
    outside = (ratios.clamp(0.9, 1.2) * advantages < ratios * advantages)[:4]
    assert 0 < int(outside.sum()) < 4
    assert float(sums["clip_fraction"]) == int(MASK.sum(1)[:4][outside].sum())


def test_where_tokens_differ_in_their_weight_each_has_the_gradient_of_its_own() -> None:
    logprobs, importance = start(), NOISE.abs()
    loss, _ = loss_of(logprobs, importance_weights=importance, clip_low=0.99, clip_high=99.0)
    ratios = sequence_ratios(logprobs).detach()[:, None]
    assert torch.allclose(gradient(loss, logprobs), -torch.where(MASK, importance * ratios * ADVANTAGES, 0.0))


def test_a_response_of_one_token_has_the_ratio_of_the_token() -> None:
    logprobs, row = start(), slice(2, 3)
    of_sequence, of_token = (loss_of(logprobs, row, ratio=ratio)[0] for ratio in ("sequence", "token"))
    assert float(of_sequence) == pytest.approx(float(of_token))
    assert torch.allclose(gradient(of_sequence, logprobs), gradient(of_token, logprobs))


def test_in_a_first_step_both_ratios_are_one_step() -> None:
    found = []
    for ratio in ("sequence", "token"):
        logprobs = start()
        loss, _ = policy_loss(
            *(logprobs, MASK),
            **{"advantages": ADVANTAGES, "sampler_logprobs": OLD, "first_step": True, "correction": "truncate"},
            ratio=ratio,
        )
        found.append((float(loss), gradient(loss, logprobs).tolist()))
    assert found[0] == found[1]


def test_the_dual_clip_holds_whole_sequences() -> None:
    far = torch.where(torch.arange(5)[:, None] == 3, 2.0, 0.0)  # exp(2) = 7.4, with advantage -0.5
    logprobs = (OLD + far).requires_grad_()
    loss, sums = loss_of(logprobs, slice(3, 4), dual_clip=3.0)
    assert float(loss) == pytest.approx(3 * 3.0 * 0.5)
    assert float(sums["dual_clip_fraction"]) == 3.0
    assert not gradient(loss, logprobs).any()


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_parts_of_a_batch_add_up_to_the_batch(cut: int) -> None:
    logprobs = start()
    whole, sums = loss_of(logprobs)
    (first, of_first), (second, of_second) = loss_of(logprobs, slice(0, cut)), loss_of(logprobs, slice(cut, 5))
    assert float(first + second) == pytest.approx(float(whole))
    assert torch.allclose(gradient(first + second, logprobs), gradient(whole, logprobs))
    for name, value in sums.items():
        assert float(of_first[name] + of_second[name]) == pytest.approx(float(value))


@pytest.mark.parametrize("padding", [0.0, float("nan"), float("inf")])
def test_prompt_and_padding_change_nothing(padding: float) -> None:
    plain = start()
    wide = torch.nn.functional.pad(torch.where(MASK, plain, padding), (2, 3), value=padding).detach().requires_grad_()
    mask = torch.nn.functional.pad(MASK, (2, 3))
    old, advantages = (torch.nn.functional.pad(values, (2, 3), value=padding) for values in (OLD, ADVANTAGES))
    loss, _ = policy_loss(wide, mask, old_logprobs=old, advantages=advantages, ratio="sequence", **CLIPS)
    expected, _ = loss_of(plain)
    assert float(loss) == pytest.approx(float(expected))
    assert torch.allclose(gradient(loss, wide)[:, 2:8], gradient(expected, plain))
    assert not gradient(loss, wide)[~mask].any()


@pytest.mark.parametrize("difference", [200.0, -200.0])
def test_a_huge_difference_leaves_value_and_gradient_finite(difference: float) -> None:
    logprobs = (OLD + difference).float().requires_grad_()
    loss, _ = loss_of(logprobs)
    assert torch.isfinite(loss) and torch.isfinite(gradient(loss, logprobs)).all()
