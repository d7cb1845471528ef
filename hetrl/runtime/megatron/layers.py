"""Plain torch layers that megatron-core builds its blocks from: RMSNorm, and attention over packed sequences.

Megatron's own norm refuses sequence parallelism, and its attention without Transformer Engine materialises the scores.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension, computed in float32 and rounded once."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Where each rank norms its part of the tokens, megatron adds the ranks' gradients up.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed and scaled tensor in the type of `x`."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


@dataclass
class Packing(PackedSeqParams):  # type: ignore[misc]
    """Where sequences begin that are laid end to end in [t]; megatron hands it to every layer.

    Its format is not megatron's `thd`, so that megatron leaves query, key and value as they are. `bounds` int32 [n + 1]
    are where sequences begin, and the end; `longest` tokens one has at most; `positions` int64 [t] of each token in its
    sequence; `places` int64 [t] of each token in rows [n, longest].
    """

    sequences: int = field(kw_only=True)
    longest: int = field(kw_only=True)
    bounds: torch.Tensor = field(kw_only=True)
    positions: torch.Tensor = field(kw_only=True)
    places: torch.Tensor = field(kw_only=True)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        """Return the packing of sequences of these lengths; nothing of it is read back from the device."""
        longest = max(lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        bounds = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
        return cls(
            sequences=len(lengths),
            longest=longest,
            bounds=bounds.to(device),
            positions=positions.to(device),
            places=(rows * longest + positions).to(device),
        )

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return [n, longest, ...] of [t, ...], zero where a sequence has no token."""
        rows = values.new_zeros(self.sequences * self.longest, *values.shape[1:])
        return rows.index_copy_(0, self.places, values).view(self.sequences, self.longest, *values.shape[1:])

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [t, ...] of [n, longest, ...]; the inverse of `rows`."""
        return rows.flatten(0, 1).index_select(0, self.places)


class PackedRotary(torch.nn.Module):
    """Megatron's rotary embedding by the position of each token in its own sequence.

    Megatron asks `get_rotary_seq_len` first and gives the answer to `forward`.
    """

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, packing: Packing) -> Packing:
        """Return the packing itself."""
        return packing

    def forward(self, packing: Packing, **_: Any) -> torch.Tensor:
        """Return [t, 1, 1, d]."""
        whole: torch.Tensor = self.rotary(packing.longest)
        return whole.index_select(0, packing.positions)


class CausalAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention with grouped queries over packed sequences, each of which sees itself alone.

    On CUDA in half precision it is one kernel of variable lengths (torch's FlashAttention); elsewhere the sequences are
    padded for `scaled_dot_product_attention`, and for nothing else.
    """

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
        packed_seq_params: Packing,
        **_: Any,
    ) -> torch.Tensor:
        """Return [t, 1, heads x d] from [t, 1, heads, d] each."""
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        grouped, packing = query.shape[2] != key.shape[2], packed_seq_params
        out: Any
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            bounds, longest, causal = packing.bounds, packing.longest, (-1, 0)
            out = varlen_attn(
                q, k, v, bounds, bounds, longest, longest, scale=self.scale, window_size=causal, enable_gqa=grouped
            )
        else:
            q, k, v = (packing.rows(x).transpose(1, 2) for x in (q, k, v))
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            out = packing.packed(out.transpose(1, 2))
        flat: torch.Tensor = out.reshape(out.shape[0], 1, -1)
        return flat


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
