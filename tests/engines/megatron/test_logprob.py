from __future__ import annotations

import pytest
import torch

from hetrl.runtime.megatron.logprob import token_logprobs


def case(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, columns, generator=generator) * 5.0
    return logits, torch.randint(0, 7, (2, 3), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_log_softmax(temperature: float) -> None:
    logits, labels = case(7)
    logprobs, entropy = token_logprobs(logits, labels, vocabulary=7, temperature=temperature)
    expected = torch.log_softmax(logits.double() / temperature, -1)
    chosen = expected.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(logprobs, chosen.float(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).float(), atol=1e-6, rtol=1e-6)


def test_the_gradient_is_that_of_log_softmax() -> None:
    logits, labels = case(7)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.arange(6.0).reshape(2, 3)
    (token_logprobs(mine, labels, vocabulary=7, temperature=0.5)[0] * weights).sum().backward()
    expected = torch.log_softmax(theirs / 0.5, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-6)


def test_padded_columns_take_no_part() -> None:
    logits, labels = case(9)
    padded = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs(padded, labels, vocabulary=7)
    expected = token_logprobs(logits[..., :7], labels, vocabulary=7)
    torch.testing.assert_close((logprobs, entropy), expected, atol=1e-6, rtol=1e-6)
    logprobs.sum().backward()
    assert padded.grad is not None
    assert (padded.grad[..., 7:] == 0).all()


def test_the_logits_stay_as_they_were() -> None:
    logits, labels = case(9)
    before = logits.clone()
    token_logprobs(logits, labels, vocabulary=7)
    assert torch.equal(logits, before)
