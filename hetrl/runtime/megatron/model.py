"""Build the megatron-core model of one rank from a Hugging Face configuration and a layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.megatron.hf_weights import padded
from hetrl.runtime.megatron.layers import PackedRotary, block_spec
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.megatron.outputs import put_head
from hetrl.runtime.megatron.recompute import recompute_selectively
from hetrl.workload import Architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# What megatron/core/models/common/embeddings/rotary_pos_embedding.py assumes for Llama 3.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def dtype_of(name: str) -> torch.dtype:
    """Return the type that a model's weights have; raises HetrlError for one that is not known."""
    if name not in DTYPES:
        raise HetrlError(f'dtype "{name}" is not known; known: {", ".join(DTYPES)}')
    return DTYPES[name]


def check_layout(architecture: Architecture, layout: Layout) -> None:
    """Raise HetrlError when the model cannot be cut as the layout says."""
    a, tensor = architecture, layout.tensor
    if layout.layers != a.layers:
        raise HetrlError(f"{a.name}: the stages {layout.stages} hold {layout.layers} layers, the model has {a.layers}")
    if a.kv_heads < tensor:
        raise HetrlError(
            f"{a.name}: tensor parallel {tensor} exceeds the {a.kv_heads} key-value heads; plan at most {a.kv_heads}"
        )
    parts = {"heads": a.heads, "key-value heads": a.kv_heads, "feed-forward width": a.intermediate}
    for what, number in parts.items():
        if number % tensor:
            raise HetrlError(f"{a.name}: tensor parallel {tensor} does not divide its {number} {what}; plan a divisor")


def build_model(
    config: Mapping[str, Any],
    architecture: Architecture,
    layout: Layout,
    dtype: torch.dtype,
    *,
    recompute: str,
    recompute_layers: int,
) -> GPTModel:
    """Return this rank's part of the model, all matrices zero until weights are loaded.

    The last stage gives hidden states [b, s, h], or with a scalar head its numbers [b, s, 1]; see `outputs`.
    Micro-batches are packed (`layers.Packing`). The parallel state must be initialised. Raises UsageError for rotary
    embeddings that cannot be computed.
    """
    transformer = _transformer_config(config, architecture, layout, dtype, _recomputation(recompute, recompute_layers))
    theta, factor = rope(config, architecture.name)
    model = GPTModel(
        transformer,
        block_spec(transformer),
        vocab_size=padded(architecture.vocabulary, layout.tensor),
        max_sequence_length=int(config.get("max_position_embeddings", 0)),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=theta,
        rope_scaling=factor is not None,
        rope_scaling_factor=factor or 1.0,
        share_embeddings_and_output_weights=architecture.tied_embeddings,
    )
    if recompute == "selective":
        recompute_selectively(model)
    model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb)
    if architecture.scalar_head:
        put_head(model)
    elif model.post_process:
        _leave_logits_to_the_loss(model.output_layer)
    return model.cuda() if torch.cuda.is_available() else model


def _leave_logits_to_the_loss(layer: ColumnParallelLinear) -> None:
    """Let the output layer pass hidden states on, whole on every rank, where its logits would not fit into memory."""

    def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        if layer.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=layer.tp_group), None
        return copy_to_tensor_model_parallel_region(hidden, layer.tp_group), None

    layer.forward = forward


def head_weight(model: GPTModel) -> torch.nn.Parameter | None:
    """Return this rank's share of the output layer, the embedding where both are tied; None but on the last stage."""
    if not model.post_process:
        return None
    tied = model.share_embeddings_and_output_weights
    weight: torch.nn.Parameter = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight


def _transformer_config(
    config: Mapping[str, Any],
    architecture: Architecture,
    layout: Layout,
    dtype: torch.dtype,
    recomputed: Mapping[str, Any],
) -> TransformerConfig:
    """Return megatron's configuration; nothing that needs CUDA is fused, so that the same code runs without."""
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.kv_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.intermediate,
        normalization="RMSNorm",
        layernorm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        qk_layernorm=architecture.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        bias_activation_fusion=True,  # keeps the input of the gate alone; compiled where there is CUDA
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=fuses_gradients(),
        deallocate_pipeline_outputs=True,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        sequence_parallel=layout.tensor > 1,
        pipeline_model_parallel_layout=_pipeline_layout(layout),
        calculate_per_token_loss=True,  # losses are sums, divided by the tokens of the whole batch
        finalize_model_grads_func=finalize_model_grads,
        **recomputed,
    )


def fuses_gradients() -> bool:
    """Return whether Apex's kernel is there that sums weight gradients up as it makes them."""
    return torch.cuda.is_available() and find_spec("fused_weight_gradient_mlp_cuda") is not None


def kernels(optimizer: Any) -> str:
    """Return, for the log, whose kernels are in use: Transformer Engine's and Apex's are where they are installed."""
    attention = "torch's variable-length kernel" if torch.cuda.is_available() else "torch's, sequences padded"
    if optimizer is None:
        return f"attention: {attention}"
    adam = type(optimizer.chained_optimizers[0].optimizer)
    missing = " (neither Transformer Engine nor Apex is installed)" if adam.__module__.startswith("torch.") else ""
    summed = "as they are made, by Apex" if fuses_gradients() else "apart (Apex's kernel is not installed)"
    return f"attention: {attention}; Adam: {adam.__module__}{missing}; weight gradients are summed {summed}"


def _recomputation(recompute: str, layers: int) -> dict[str, Any]:
    """Return megatron's settings of computing the first `layers` layers of this stage again in the backward pass."""
    full = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    settings = {"none": {}, "selective": {}, "full": full if layers else {}}  # selective: `recompute_selectively`
    if recompute not in settings:
        raise HetrlError(f'recompute "{recompute}" is not known; known: {", ".join(settings)}')
    return settings[recompute]


def _pipeline_layout(layout: Layout) -> list[list[str]] | None:
    """Return the stages in megatron's words; None for a single one."""
    if layout.pipeline == 1:
        return None
    stages = [["decoder"] * (end - start) for start, end in layout.stages]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def rope(config: Mapping[str, Any], name: str) -> tuple[float, float | None]:
    """Return the base of the rotary embedding and the factor of Llama 3's scaling (None: no scaling).

    Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises UsageError for any
    other scaling.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    whole = not any(isinstance(value, Mapping) for value in parameters.values())  # and not one per kind of attention
    if kind == "default" and whole:
        return theta, None
    known = whole and "factor" in parameters and all(parameters.get(key) == one for key, one in LLAMA3_ROPE.items())
    if kind == "llama3" and known:
        return theta, float(parameters["factor"])
    raise UsageError(f"{name}: rotary embedding {parameters} in config.json is not supported; known: default, llama3")


def global_parameters(model: torch.nn.Module, layout: Layout, stage: int) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters under their names with global layer indices."""
    start = layout.stages[stage][0]
    return {
        re.sub(r"^decoder\.layers\.(\d+)\.", lambda found: f"decoder.layers.{int(found[1]) + start}.", name): parameter
        for name, parameter in model.named_parameters()
    }
