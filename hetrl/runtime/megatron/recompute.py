"""Selective recomputation: what no product makes is freed once it is read, and made again in the backward pass.

That is what the two norms of a layer and the activation of its feed-forward give (Korthikanti et al., arXiv
2205.05198, recompute attention for the same reason: many bytes, few operations; here its kernel does so already).
Megatron's own `recompute_modules` have the norms alone, and those only where Transformer Engine is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP


def recompute_selectively(model: GPTModel) -> None:
    """Let every layer of a model free the outputs of its norms and of its activation."""
    for layer in model.decoder.layers:
        _free_output(layer.input_layernorm, layer.self_attention.linear_qkv)
        _free_output(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)
        _free_activation(layer.mlp)


def _free_output(norm: torch.nn.Module, product: torch.nn.Module) -> None:
    """Free what `norm` gives once `product`, its only reader, has read it."""
    plain: Callable[[torch.Tensor], torch.Tensor] = norm.forward
    pending: list[CheckpointWithoutOutput] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return plain(x)
        pending.append(CheckpointWithoutOutput(fp8=None))
        out: torch.Tensor = pending[-1].checkpoint(plain, x)
        return out

    def read(_: torch.nn.Module, __: Any, out: tuple[torch.Tensor, ...]) -> None:
        if pending:
            pending.pop().discard_output_and_register_recompute(out[0])

    norm.forward = forward
    product.register_forward_hook(read)


def _free_activation(mlp: MLP) -> None:
    """Let a SwiGLU feed-forward keep the input of its activation alone."""
    plain = mlp.forward

    def forward(hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not torch.is_grad_enabled():
            return plain(hidden)  # type: ignore[no-any-return]
        gate, bias = mlp.linear_fc1(hidden)
        again = CheckpointWithoutOutput(fp8=None)
        out, out_bias = mlp.linear_fc2(again.checkpoint(bias_swiglu_impl, gate, bias))
        again.discard_output_and_register_recompute(out)
        return out, out_bias

    mlp.forward = forward
