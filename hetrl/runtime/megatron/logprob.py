"""Log-probabilities and entropy over a vocabulary that tensor-parallel ranks share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps the softmax alone, so that a micro-batch holds one float32 copy of its logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        group: dist.ProcessGroup | None,
        first: int,
        vocabulary: int,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = logits.float() / temperature
        x[..., max(0, vocabulary - first) :] = float("-inf")
        largest = x.amax(-1, keepdim=True)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        x -= largest
        local = labels - first
        inside = (local >= 0) & (local < x.shape[-1])
        local = local.clamp(0, x.shape[-1] - 1).unsqueeze(-1)
        weights = x.exp()
        x.masked_fill_(x == float("-inf"), 0.0)
        target = x.gather(-1, local).squeeze(-1) * inside
        sums = torch.stack((weights.sum(-1), (weights * x).sum(-1), target))
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, target = sums.unbind()
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), local, inside, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return target - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        softmax, local, inside, entropy = ctx.saved_tensors
        of_logprob, of_entropy = gradients
        result = torch.zeros_like(softmax)
        if of_logprob is not None:
            gradient = (of_logprob / ctx.temperature).unsqueeze(-1)
            result = -softmax * gradient
            result.scatter_add_(-1, local, gradient * inside.unsqueeze(-1))
        if of_entropy is not None:
            gradient = (of_entropy / ctx.temperature).unsqueeze(-1)
            result -= (torch.xlogy(softmax, softmax) + softmax * entropy.unsqueeze(-1)) * gradient
        return result.to(ctx.dtype), None, None, None, None, None


def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocabulary: int,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(label) and the entropy of each position, both float32 of the shape of `labels`.

    `logits` [..., v] is this rank's share of the (padded) vocabulary, `labels` [...] are global token ids; the columns
    beyond the real `vocabulary` do not take part. `group` is the tensor-parallel group (None: no split). With
    x = logits / temperature, m its maximum and Z = sum exp(x - m): log p(y) = x_y - m - log Z and
    H = log Z - sum exp(x - m) (x - m) / Z; the sums run over the group (Megatron-LM, arXiv 1909.08053, section 3).
    Both are differentiable: with p = softmax(x), dH / dlogits_j = -p_j (log p_j + H) / temperature.
    """
    alone = group is None or dist.get_world_size(group) == 1
    first = 0 if alone else dist.get_rank(group) * logits.shape[-1]
    result: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, labels, None if alone else group, first, vocabulary, temperature
    )
    return result
