"""The settings of the optimiser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW (arXiv 1711.05101) with gradient clipping by the global norm (`clip_grad` 0: no clipping).

    Norms and biases do not decay. `beta2` 0.95 is what large language models are trained with (GPT-3, arXiv
    2005.14165, appendix B). `distributed` shards the optimiser's state over the replicas (ZeRO-1, arXiv 1910.02054).
    """

    learning_rate: float
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    distributed: bool = True
