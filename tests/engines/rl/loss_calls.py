"""The policy loss with its arrays and coefficients by name."""

from __future__ import annotations

from typing import Any

import torch

from hetrl.runtime.rl import losses
from hetrl.runtime.wire import LossSettings

ARRAYS = (
    *("old_logprobs", "advantages", "reference_logprobs", "importance_weights", "token_weights"),
    *("sampler_logprobs", "fresh"),
)


def policy_loss(
    logprobs: torch.Tensor, mask: torch.Tensor, entropy: torch.Tensor | None = None, **given: Any
) -> tuple[torch.Tensor, losses.Sums]:
    """Return the loss with those of `ARRAYS` and of the coefficients of `LossSettings` that are given."""
    extras = {name: given.pop(name) for name in ARRAYS if name in given}
    return losses.policy_loss(logprobs, mask, extras, LossSettings(**given), entropy)
