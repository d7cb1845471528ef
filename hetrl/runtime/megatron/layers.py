"""Plain torch layers that megatron-core builds its blocks from: RMSNorm and scaled-dot-product attention.

Megatron's own norm refuses sequence parallelism, and its attention without Transformer Engine materialises the scores.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension, computed in float32 and rounded once."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed and scaled tensor in the type of `x`."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention with grouped queries by torch's fused kernel (`scaled_dot_product_attention`)."""

    def __init__(
        self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return [s, b, heads x d] from [s, b, heads, d] each; positions see themselves and what precedes them.

        Of packed sequences ([t, heads, d], one after the other) each sees itself alone: [t, heads x d].
        """
        if packed_seq_params is None:
            return self._causal(query, key, value)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        whole = [x.unsqueeze(1) for x in (query, key, value)]
        parts = [self._causal(*(x[start:end] for x in whole)) for start, end in itertools.pairwise(bounds)]
        return torch.cat(parts).squeeze(1)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).reshape(out.shape[2], out.shape[0], -1)


def packing(real: torch.Tensor | None) -> PackedSeqParams | None:
    """Say in megatron's words where packed sequences begin; `real` bool [b, s] are their tokens. None: not packed.

    The bounds stay on the CPU, where the layers read them.
    """
    if real is None:
        return None
    lengths = real.sum(1).cpu()
    bounds = functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the layers of this rank's pipeline stage, made of this module's norm and attention."""
    layer: ModuleSpec = copy.deepcopy(
        get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
