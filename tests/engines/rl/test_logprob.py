from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hetrl.cost.compute import StageShape, logit_flops, training_seconds
from hetrl.cost.efficiency import calibrated
from hetrl.runtime.rl import logprob
from hetrl.runtime.rl.logprob import token_logprobs
from hetrl.workload import architecture

HIDDEN = 16
# One chunk, and chunks of two positions, the last one of a single position less.
CHUNKS = pytest.mark.parametrize("chunk_bytes", [2**28, 2 * 4 * 7], ids=["whole", "chunks"])


def case(columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [2, 3, h], an output layer [columns, h] and labels below 7."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, HIDDEN, generator=generator)
    weight = torch.randn(columns, HIDDEN, generator=generator)
    return hidden, weight, torch.randint(0, 7, (2, 3), generator=generator)


def expected(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain torch, in double precision."""
    logprobs = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float(), entropy.float()


@CHUNKS
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_log_softmax(temperature: float, chunk_bytes: int) -> None:
    found = token_logprobs(*case(7), vocabulary=7, temperature=temperature, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(found, expected(*case(7), temperature), atol=1e-5, rtol=1e-6)


@CHUNKS
@pytest.mark.parametrize("result", [0, 1], ids=["log-prob", "entropy"])
def test_the_gradients_are_those_of_log_softmax(result: int, chunk_bytes: int) -> None:
    hidden, weight, labels = case(7)
    mine = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    theirs = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    factors = torch.arange(6.0).reshape(2, 3)
    found = token_logprobs(*mine, labels, vocabulary=7, temperature=0.5, chunk_bytes=chunk_bytes)
    for pair in (found, expected(*theirs, labels, 0.5)):
        (pair[result] * factors).sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-5)


@CHUNKS
def test_padded_columns_take_no_part(chunk_bytes: int) -> None:
    hidden, weight, labels = case(9)
    padded = weight.clone().requires_grad_()
    logprobs, entropy = token_logprobs(hidden, padded, labels, vocabulary=7, chunk_bytes=chunk_bytes)
    torch.testing.assert_close((logprobs, entropy), expected(hidden, weight[:7], labels, 1.0), atol=1e-5, rtol=1e-6)
    (logprobs + entropy).sum().backward()
    assert padded.grad is not None
    assert (padded.grad[7:] == 0).all()
    assert padded.grad.isfinite().all()


def test_the_gradient_of_the_output_layer_goes_into_megatrons_buffer() -> None:
    hidden, weight, labels = case(7)
    plain, buffered = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    buffered.main_grad = torch.ones_like(weight)  # of an earlier micro-batch
    for one in (plain, buffered):
        token_logprobs(hidden, one, labels, vocabulary=7, chunk_bytes=2 * 4 * 7)[0].sum().backward()
    assert plain.grad is not None
    assert buffered.grad is not None
    torch.testing.assert_close(buffered.main_grad + buffered.grad, plain.grad + 1)


def test_the_backward_pass_makes_the_logits_again_as_plans_count_it() -> None:
    hidden, weight, labels = case(7)
    mine = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    with FlopCounterMode(display=False) as forward:
        logprobs, _ = token_logprobs(*mine, labels, vocabulary=7)
    with FlopCounterMode(display=False) as backward:
        logprobs.sum().backward()
    model = replace(architecture("qwen3-0.6b"), hidden=HIDDEN, vocabulary=7)
    shape = StageShape(model, 0, False, True, True, 1, calibrated().rates("cpu"))
    assert forward.get_total_flops() == labels.numel() * logit_flops(shape)
    assert backward.get_total_flops() == 3 * labels.numel() * logit_flops(shape)
    kept = replace(shape, logits_again=False)
    again = sum(training_seconds(shape, 6.0, 3.0, "none")) - sum(training_seconds(kept, 6.0, 3.0, "none"))
    assert again * shape.rates.training_flops == pytest.approx(labels.numel() * logit_flops(shape))


def test_what_is_compiled_on_cuda_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def both() -> list[torch.Tensor]:
        hidden, weight, labels = case(9)  # two columns of padding
        mine = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        found = token_logprobs(*mine, labels, vocabulary=7, temperature=0.7, chunk_bytes=4 * 4 * 9)
        (found[0] + found[1]).sum().backward()
        return [*found, *(one.grad for one in mine if one.grad is not None)]

    plain = both()
    traced = cache(lambda function: torch.compile(function, backend="aot_eager", dynamic=True, fullgraph=True))
    monkeypatch.setattr(logprob, "_on", lambda tensor, function: traced(function))
    torch.testing.assert_close(both(), plain)
