"""Losses over the target tokens of a micro-batch.

Each loss returns the sum over the masked tokens and a dict of sums of what is worth watching; the engine divides both
by the number of masked tokens of the whole batch, so that the result does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetrl.errors import HetrlError

Sums = dict[str, torch.Tensor]

REQUIRED_EXTRAS = {"policy": ("old_logprobs", "advantages"), "supervised": ()}
COMMON_HYPER = ("learning_rate", "temperature")
HYPER = {"policy": ("clip_low", "clip_high", "kl_coefficient"), "supervised": ()}
METRICS = ("loss", "ratio", "clip_fraction", "logprob_difference", "kl", "entropy")


def policy_loss(
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    reference_logprobs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Return the clipped surrogate of PPO and GRPO, with an optional KL penalty, summed over the masked tokens.

    All tensors are [b, s]; `mask` is bool. With r = exp(logprob - old_logprob) and A the advantage, a token's loss is
        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3,  k3 = exp(d) - d - 1,  d = ref - logprob
    Sources: PPO (arXiv 1707.06347, equation 7); separate bounds: DAPO (arXiv 2503.14476, "clip-higher"); k3 as in GRPO
    (arXiv 2402.03300, equation 4) after Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html). The
    KL term needs `reference_logprobs`; where they are given without a coefficient, k3 is a metric only.

    Metrics (sums): ratio, clip_fraction (tokens whose clipped branch is the smaller one), logprob_difference
    (|logprob - old_logprob|), kl and entropy where their inputs are given.
    """
    difference = _masked(logprobs - old_logprobs, mask)
    ratio = difference.exp()
    advantages = _masked(advantages, mask)
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -torch.minimum(plain, clipped).sum()
    sums = {
        "ratio": _masked(ratio, mask).sum(),
        "clip_fraction": (clipped < plain).sum().to(logprobs.dtype),
        "logprob_difference": difference.abs().sum(),
    }
    if reference_logprobs is not None:
        distance = _masked(reference_logprobs - logprobs, mask)
        kl = (distance.exp() - distance - 1.0).sum()
        sums["kl"] = kl
        loss = loss + kl_coefficient * kl if kl_coefficient else loss
    elif kl_coefficient:
        raise HetrlError("policy loss: kl_coefficient needs reference_logprobs in the batch; give them or set it to 0")
    if entropy is not None:
        sums["entropy"] = _masked(entropy, mask).sum()
    return loss, {name: value.detach() for name, value in sums.items()}


def supervised_loss(
    logprobs: torch.Tensor, mask: torch.Tensor, *, entropy: torch.Tensor | None = None
) -> tuple[torch.Tensor, Sums]:
    """Return the negative log-likelihood of the masked tokens, summed; all tensors are [b, s]. Metric: entropy."""
    sums = {} if entropy is None else {"entropy": _masked(entropy, mask).sum().detach()}
    return -_masked(logprobs, mask).sum(), sums


def evaluate(
    loss: str,
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    extras: Mapping[str, torch.Tensor],
    hyper: Mapping[str, float | str],
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Compute the loss of this name; `extras` and `hyper` as `check` accepts them."""
    if loss == "supervised":
        return supervised_loss(logprobs, mask, entropy=entropy)
    return policy_loss(
        logprobs,
        mask,
        old_logprobs=extras["old_logprobs"],
        advantages=extras["advantages"],
        reference_logprobs=extras.get("reference_logprobs"),
        entropy=entropy,
        **{name: float(hyper[name]) for name in HYPER["policy"] if name in hyper},
    )


def check(loss: str, extras: Mapping[str, object], hyper: Mapping[str, float | str]) -> None:
    """Raise HetrlError for an unknown loss or hyper-parameter, or for a batch without an array that the loss needs."""
    if loss not in REQUIRED_EXTRAS:
        raise HetrlError(f'unknown loss "{loss}"; known: {", ".join(REQUIRED_EXTRAS)}')
    known = (*COMMON_HYPER, *HYPER[loss])
    for name in hyper:
        if name not in known:
            raise HetrlError(f'{loss} loss: unknown hyper-parameter "{name}"; known: {", ".join(known)}')
    needed = list(REQUIRED_EXTRAS[loss])
    if float(hyper.get("kl_coefficient", 0.0)):
        needed.append("reference_logprobs")
    for name in needed:
        if name not in extras:
            raise HetrlError(f'{loss} loss: the batch has no "{name}"; it has {sorted(extras) or "no extras"}')


def _masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `values` with exact zeros outside the mask, whatever stands there, and no gradient from there."""
    return torch.where(mask, values, torch.zeros_like(values))
