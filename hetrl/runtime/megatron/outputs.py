"""What comes of a model's last states: log-probs of tokens under a language head, numbers under a scalar one.

language head   score: logprobs            loss: policy, supervised
scalar head     score: values, rewards     loss: value
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn import functional

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.batch import MicroBatch
from hetrl.runtime.rl import losses
from hetrl.runtime.rl.logprob import token_logprobs
from hetrl.runtime.wire import LossSettings
from hetrl.workload import Architecture

LANGUAGE_SCORES, SCALAR_SCORES = ("logprobs",), ("values", "rewards")


class ScalarHead(torch.nn.Module):
    """An output layer with one number per token; it takes the place of megatron's, which has the vocabulary's size.

    Every tensor-parallel rank has all of it and applies it to its own part of the sequence; megatron sums its gradient
    over them, as that of a norm.
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        like = replaced.weight
        self.weight = torch.nn.Parameter(torch.zeros(1, like.shape[1], dtype=like.dtype, device=like.device))
        self._sequence_parallel, self._group = replaced.sequence_parallel, replaced.tp_group
        self.weight.sequence_parallel = replaced.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Return float32 [s, b, 1] of states [s, b, h], as megatron calls its output layer."""
        numbers = functional.linear(states.float(), self.weight.float())
        if self._sequence_parallel:
            whole = gather_from_sequence_parallel_region(numbers, tensor_parallel_output_grad=False, group=self._group)
            return whole, None
        return numbers, None


class LanguageOutput:
    """Log-probs: `states` are the hidden states [1, t, h] of a micro-batch, `weight` the rank's share of the head."""

    def __init__(self, weight: torch.nn.Parameter | None, vocabulary: int, group: dist.ProcessGroup) -> None:
        self._weight, self._vocabulary, self._group = weight, vocabulary, group

    def scores(self, micro: MicroBatch, states: torch.Tensor, what: str, temperature: float) -> torch.Tensor:
        """Return log p(token j | tokens before j), [b, s]."""
        return self._logprobs(micro, states, temperature)[0]

    def loss(self, micro: MicroBatch, states: torch.Tensor, settings: LossSettings) -> tuple[torch.Tensor, losses.Sums]:
        """Return the sum of the loss over the masked tokens, and what to report."""
        logprobs, entropy = self._logprobs(micro, states, settings.temperature)
        return losses.evaluate(logprobs, micro.mask, micro.extras, settings, entropy)

    def _logprobs(
        self, micro: MicroBatch, states: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and entropies [b, s] of a micro-batch's tokens; 0 in column 0, which nothing predicts."""
        assert self._weight is not None  # of the last stage
        pair = token_logprobs(
            states[:, :-1],
            self._weight,
            micro.inputs[:, 1:],
            vocabulary=self._vocabulary,
            group=self._group,
            temperature=temperature,
        )
        logprobs, entropy = (micro.rows(functional.pad(values, (1, 0))) for values in pair)
        return logprobs, entropy


class ScalarOutput:
    """Values and rewards: `states` are what `ScalarHead` gave of a micro-batch, [1, t, 1]."""

    def scores(self, micro: MicroBatch, states: torch.Tensor, what: str, temperature: float) -> torch.Tensor:
        """Return [b, s]: `values` of the text before token j, as advantages need them; `rewards` of that up to it.

        The reward of a text is that of its last token, as in transformers' models for sequence classification.
        """
        return self._values(micro, states) if what == "values" else micro.all_rows(states[..., 0])

    def loss(self, micro: MicroBatch, states: torch.Tensor, settings: LossSettings) -> tuple[torch.Tensor, losses.Sums]:
        """Return the sum of the loss over the masked tokens, and what to report."""
        return losses.evaluate(self._values(micro, states), micro.mask, micro.extras, settings)

    def _values(self, micro: MicroBatch, states: torch.Tensor) -> torch.Tensor:
        return micro.rows(functional.pad(states[:, :-1, 0], (1, 0)))


def output_of(
    architecture: Architecture, weight: torch.nn.Parameter | None, group: dist.ProcessGroup
) -> LanguageOutput | ScalarOutput:
    """Return the output of a model, whose head on this rank is `weight`."""
    return ScalarOutput() if architecture.scalar_head else LanguageOutput(weight, architecture.vocabulary, group)


def check_scores(architecture: Architecture, what: str) -> None:
    """Raise HetrlError where the head of a model does not give such scores."""
    known = SCALAR_SCORES if architecture.scalar_head else LANGUAGE_SCORES
    if what not in known:
        raise HetrlError(f'{architecture.name}: a model with this head has no "{what}"; it has {", ".join(known)}')


def check_loss(architecture: Architecture, settings: LossSettings) -> None:
    """Raise HetrlError where a loss is not for the head of a model."""
    if architecture.scalar_head != (settings.loss == losses.VALUE):
        head = "scalar" if architecture.scalar_head else "language"
        raise HetrlError(f"{architecture.name}: its {head} head is not trained with the loss {settings.loss}")


def put_head(model: GPTModel) -> None:
    """Give a model a scalar head where it has an output layer, on its last stage."""
    if model.post_process:
        model.output_layer = ScalarHead(model.output_layer)
