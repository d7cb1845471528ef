"""Log-probabilities and entropy of tokens, from hidden states: the logits are made chunk by chunk and never kept.

A micro-batch's logits are its largest tensor: vocabulary / hidden size is 40 for a Qwen3-8B. Here a chunk of positions
bounds them, in the forward pass and in the backward pass, which makes them again. What follows the products is compiled
where there is CUDA: one after the other, these steps read and write the largest tensor of all a dozen times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from hetrl.workload import HEAD_CHUNK_BYTES


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's columns of the vocabulary: from `first` on, real ones below `vocabulary`; the logits' `temperature`.

    `group` are the tensor-parallel ranks that hold the others (None: nobody does).
    """

    group: dist.ProcessGroup | None
    first: int
    vocabulary: int
    temperature: float

    @property
    def real(self) -> int:
        """Return how many of this rank's columns are no padding, or more."""
        return max(0, self.vocabulary - self.first)

    def place(self, labels: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the column [n, 1] of each label here, and bool [n]: whether it is one of this rank's."""
        local = labels - self.first
        inside = (local >= 0) & (local < width)
        return local.clamp(0, width - 1).unsqueeze(-1), inside


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, columns: VocabularyShard, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local, inside = columns.place(labels, weight.shape[0])
        sums = torch.empty(4, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for part in _parts(hidden.shape[0], rows):
            product = hidden[part] @ weight.t()
            sums[:, part] = _on(hidden, _sums)(product, local[part], inside[part], columns.real, columns.temperature)
            del product  # its memory is for the next one
        log_total, entropy, target = _over_ranks(sums, columns.group)
        ctx.save_for_backward(hidden, weight, local, inside, log_total, entropy)
        ctx.columns, ctx.rows = columns, rows
        ctx.set_materialize_grads(False)
        return target - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, local, inside, log_total, entropy = ctx.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        # Megatron sums gradients in a buffer of its own: into it, many chunks add up without rounding in between.
        total = getattr(weight, "main_grad", of_weight)
        for part in _parts(hidden.shape[0], ctx.rows):
            of_logits = _on(hidden, _of_logits)(
                hidden[part] @ weight.t(),
                local[part],
                inside[part],
                log_total[part],
                entropy[part],
                [_cut(g, part) for g in gradients],
                ctx.columns.real,
                ctx.columns.temperature,
            )
            of_hidden[part] = of_logits @ weight
            total += of_logits.t() @ hidden[part]
            del of_logits
        return of_hidden, of_weight, None, None, None


@cache
def _compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, dynamic=True)  # chunks are of many sizes


def _on(tensor: torch.Tensor, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function as it is fastest on the device of a tensor."""
    return _compiled(function) if tensor.is_cuda else function


def _logits(product: torch.Tensor, real: int, temperature: float) -> torch.Tensor:
    """Return float32 logits [n, v] over the temperature, -inf in the columns that pad the vocabulary."""
    x = product.float().div_(temperature)
    return x.masked_fill_(torch.arange(x.shape[-1], device=x.device) >= real, float("-inf"))


def _sums(
    product: torch.Tensor, local: torch.Tensor, inside: torch.Tensor, real: int, temperature: float
) -> torch.Tensor:
    """Return [4, n] of logits [n, v]: the largest, sum exp(x - largest), the same weighted by x - largest, the label's.

    In place: a chunk is large.
    """
    x = _logits(product, real, temperature)
    largest = x.amax(-1).clamp_(min=torch.finfo(x.dtype).min)  # a rank may hold nothing but padding
    x -= largest.unsqueeze(-1)
    weights = x.exp()
    total = weights.sum(-1)
    x.clamp_(min=torch.finfo(x.dtype).min)  # 0 x -inf is no number
    target = (x.gather(-1, local).squeeze(-1) + largest) * inside
    return torch.stack((largest, total, weights.mul_(x).sum(-1), target))


def _over_ranks(sums: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log sum exp x, the entropy and the label's logit [n] over all columns, from `_sums` of this rank's."""
    largest, total, weighted, target = sums.unbind()
    most = largest.clone()
    if group is not None:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        shift = (largest - most).clamp_(min=-1e30)  # of a rank with padding alone: times a scale of 0 it stays 0
        scale = shift.exp()
        summed = torch.stack((scale * total, scale * (weighted + shift * total), target))
        dist.all_reduce(summed, group=group)
        total, weighted, target = summed.unbind()
    log_sum = total.log()
    return most + log_sum, log_sum - weighted / total, target


def _of_logits(
    product: torch.Tensor,
    local: torch.Tensor,
    inside: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    gradients: list[torch.Tensor | None],
    real: int,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient [n, v] of the product, in its type, from the gradients [n] of both results."""
    of_logprob, of_entropy = gradients
    result = _logits(product, real, temperature).sub_(log_total.unsqueeze(-1)).exp_()  # in place: a chunk is large
    of_spread = None
    if of_entropy is not None:
        of_spread = torch.xlogy(result, result).addcmul_(result, entropy.unsqueeze(-1)).mul_(of_entropy.unsqueeze(-1))
    if of_logprob is None:
        result.zero_()
    else:
        result.mul_(-of_logprob.unsqueeze(-1))
    if of_spread is not None:
        result.sub_(of_spread)
    of_label = result.div_(temperature).gather(-1, local)
    if of_logprob is not None:
        of_label = of_label + (of_logprob * inside / temperature).unsqueeze(-1)
    return result.to(product.dtype).scatter_(-1, local, of_label.to(product.dtype))


def _parts(length: int, rows: int) -> Iterator[slice]:
    for start in range(0, length, rows):
        yield slice(start, start + rows)


def _cut(gradient: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if gradient is None else gradient[part]


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocabulary: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    chunk_bytes: int = HEAD_CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(label) and the entropy of each position, both float32 of the shape of `labels`.

    `hidden` [..., h] are the last layer's states, the same on all ranks of the tensor-parallel `group` (None: no
    split), `weight` [v, h] this rank's share of the (padded) output layer, `labels` [...] global token ids; the columns
    beyond the real `vocabulary` do not take part. With x = hidden weight^T / temperature, m its maximum and
    Z = sum exp(x - m): log p(y) = x_y - m - log Z and H = log Z - sum exp(x - m) (x - m) / Z; the sums run over the
    group (Megatron-LM, arXiv 1909.08053, section 3).

    Both are differentiable: with p = softmax(x), dH / dx_j = -p_j (log p_j + H). The gradient of `hidden` is this
    rank's share of a sum over the group; that of `weight` goes into `weight.main_grad` where Megatron gave it one. At
    most `chunk_bytes` of float32 logits are there at a time, twice.
    """
    alone = group is None or dist.get_world_size(group) == 1
    first = 0 if group is None or alone else dist.get_rank(group) * weight.shape[0]
    columns = VocabularyShard(None if alone else group, first, vocabulary, temperature)
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    logprobs, entropy = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), columns, rows
    )
    return logprobs.view(labels.shape), entropy.view(labels.shape)
