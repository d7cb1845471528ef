"""Seconds of the products on one device: FLOPs, bytes read, and the roofline between them.

Everything here is of one pipeline stage on one of its `tensor_parallel` equal ranks, without communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hetrl.cost.efficiency import Rates
from hetrl.cost.formulas import overlapped
from hetrl.workload import Architecture

# Per parameter, of an Adam update in mixed precision: it reads gradient, master and two moments in fp32 (16) and writes
# master, moments and the bf16 weight (14). Source of what there is: ZeRO (arXiv 1910.02054), section 3.1.
ADAM_BYTES = 30


@dataclass(frozen=True)
class StageShape:
    """One pipeline stage as the formulas see it.

    `first` and `last` are its place in the pipeline (both where there is one stage). `head` is true for the tasks that
    end in the vocabulary; critic and reward model end in one number, whose product is left out. `rates` are those of
    each rank's GPU. `recompute_layers` are those that full recomputation computes again (None: all). `logits_again`:
    whether the backward pass makes the logits again, as our training engine does instead of keeping them.
    """

    architecture: Architecture
    layers: int
    first: bool
    last: bool
    head: bool
    tensor_parallel: int
    rates: Rates
    weight_bytes: int = 2
    recompute_layers: int | None = None
    logits_again: bool = True

    @cached_property
    def parameters(self) -> float:
        """Return the parameters that one rank holds.

        A tied embedding is held once where the first stage is also the last, and twice in a longer pipeline.
        """
        model = self.architecture
        count = self.layers * model.layer_parameters
        if self.first:
            count += model.embedding_parameters + model.positions * model.hidden
        if self.last:
            count += model.norm_parameters * model.hidden
            shared = self.first and model.tied_embeddings
            count += model.head_parameters if self.head and not shared else 0
            count += 0 if self.head else model.hidden
        return count / self.tensor_parallel

    @cached_property
    def matrix_parameters(self) -> float:
        """Return the parameters of one rank that every token is multiplied with: no input embedding, with the head."""
        count = self.layers * self.architecture.layer_matrix_parameters
        count += self.architecture.head_parameters if self.last and self.head else 0
        return count / self.tensor_parallel

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Return the key and value bytes of one token on one rank; KV heads replicate once TP exceeds them."""
        model = self.architecture
        share = max(1.0, model.kv_heads / self.tensor_parallel) / model.kv_heads
        return self.layers * model.kv_bytes_per_token_layer * self.weight_bytes / 2 * share

    def recomputed(self, recompute: str) -> int:
        """Return how many layers a backward pass with this recomputation computes again, whole."""
        if recompute != "full":
            return 0
        return self.layers if self.recompute_layers is None else self.recompute_layers


@lru_cache(maxsize=65_536)  # a fit asks with ever other rates
def forward_flops(stage: StageShape, sequence: float) -> float:
    """Return the forward FLOPs per token of one rank: 2 per matrix parameter + causal attention 2 L h s.

    `h` is heads x head_dim. Source: Korthikanti et al. (arXiv 2205.05198), appendix A, with the causal half; times
    three it is the 6 N + 6 L h s per trained token of the PaLM paper (arXiv 2204.02311, appendix B), causal.
    """
    model = stage.architecture
    attention = 2 * stage.layers * model.heads * model.head_dim * sequence / stage.tensor_parallel
    return 2 * stage.matrix_parameters + attention


def logit_flops(stage: StageShape) -> float:
    """Return the FLOPs per token in which one rank makes its logits; none where it has no language head."""
    if not (stage.last and stage.head):
        return 0.0
    return 2 * stage.architecture.head_parameters / stage.tensor_parallel


def gradient_bytes(dtype: str, weight_bytes: int) -> int:
    """Return the bytes of the gradient of one parameter, as it is summed up and reduced: 2 in bf16, 4 in fp32.

    A model in fp32 has gradients in fp32. Source: Megatron-core's `DistributedDataParallelConfig`, whose buffers are of
    the parameters' type unless `grad_reduce_in_fp32`.
    """
    return 2 if dtype == "bf16" and weight_bytes == 2 else 4


def layer_activation_bytes(shape: StageShape) -> float:
    """Return the bytes of activations per token that one layer keeps for its backward, on one rank.

    Inputs of the norms, projections and residuals (4 h), q and the attention's output (2 x heads x head_dim), k and v,
    the feed-forward's matrices (3 or 2 x intermediate); for a 4h feed-forward this is close to the 34 h of Korthikanti
    et al. (arXiv 2205.05198, table 2) with sequence parallelism and without the attention matrix (FlashAttention).
    """
    model = shape.architecture
    values = 4 * model.hidden + model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    values += (3 if model.gated_mlp else 2) * model.intermediate
    return values * shape.weight_bytes / shape.tensor_parallel


def unmultiplied_bytes(shape: StageShape) -> float:
    """Return the bytes per token that a layer keeps and selective recomputation frees: no product makes them.

    What its two norms and its activation give, on one rank.
    """
    model = shape.architecture
    return (2 * model.hidden + model.intermediate) * shape.weight_bytes / shape.tensor_parallel


def weight_seconds(stage: StageShape) -> float:
    """Return the time of reading the weights of a rank once."""
    return stage.matrix_parameters * stage.weight_bytes / stage.rates.decode_bytes


def prefill_seconds(stage: StageShape, tokens: float, sequence: float) -> float:
    """Return the time of the products of a forward pass over `tokens` tokens in sequences of length `sequence`.

    FLOPs over the reached peak, overlapped with reading the weights once.
    """
    return overlapped(tokens * forward_flops(stage, sequence) / stage.rates.prefill_flops, weight_seconds(stage))


def prompt_seconds(stage: StageShape, tokens: float, sequence: float, prompts: float) -> float:
    """Return the time in which a rollout engine takes prompts of `tokens` tokens in all; as `prefill_seconds`.

    Of whole prompts the engine reaches a share of the rate; the last token of each alone meets the vocabulary.
    """
    flops = tokens * forward_flops(stage, sequence) - (tokens - prompts) * logit_flops(stage)
    return overlapped(flops / (stage.rates.prefill_flops * stage.rates.prompts), weight_seconds(stage))


def training_seconds(stage: StageShape, tokens: float, sequence: float, recompute: str) -> tuple[float, float]:
    """Return the forward and the backward time of one micro-batch of `tokens` tokens.

    Backward is twice the forward (two products per matrix, a gradient per value), and what it computes again: the
    logits, and forward passes of whole layers (6 N + 2 N), or selectively what the layers make without products.
    """
    forward = _forward_seconds(stage, tokens, sequence)
    again = tokens * logit_flops(stage) / stage.rates.training_flops if stage.logits_again else 0.0
    if layers := stage.recomputed(recompute):
        again += _forward_seconds(replace(stage, layers=layers, last=False), tokens, sequence)
    elif recompute == "selective":
        again += 2 * tokens * stage.layers * unmultiplied_bytes(stage) / stage.rates.activation_bytes_per_s
    return forward, 2 * forward + again


def _forward_seconds(stage: StageShape, tokens: float, sequence: float) -> float:
    return tokens * product_seconds(stage, sequence) + unmultiplied_seconds(stage, tokens)


def pass_seconds(stage: StageShape, tokens: float, sequence: float) -> float:
    """Return the time of the products of a forward pass of the trainer alone, overlapped with reading the weights."""
    return overlapped(tokens * product_seconds(stage, sequence), weight_seconds(stage))


def product_seconds(stage: StageShape, sequence: float) -> float:
    """Return the seconds per token of the trainer's products in a forward pass.

    Attention's products run at a rate of their own: the softmax between them is no product, half of each tile on the
    diagonal is thrown away, and the backward pass computes the scores again (FlashAttention-2, arXiv 2307.08691).
    """
    device, linear = stage.rates, forward_flops(stage, 0)
    attention = (forward_flops(stage, sequence) - linear) / device.attention
    return (linear + attention) / device.training_flops


def unmultiplied_seconds(stage: StageShape, tokens: float) -> float:
    """Return what a forward pass of the trainer takes beside its products.

    What norms, activations, residuals and the loss move, and the launches of each layer.
    """
    moved = tokens * activation_traffic_bytes(stage) / stage.rates.activation_bytes_per_s
    return moved + stage.layers * stage.rates.overhead.layer


def activation_traffic_bytes(stage: StageShape) -> float:
    """Return the bytes per token that a forward pass moves beside its products, on one rank.

    Each value that a layer keeps for its backward is written once and read once; a logit is written, read by the
    softmax and written again as its gradient, in fp32.
    """
    moved = 2 * stage.layers * layer_activation_bytes(stage)
    if stage.last and stage.head:
        moved += 4 * stage.architecture.vocabulary / stage.tensor_parallel  # x 3 with the backward: 12 B per logit
    return moved


def decode_seconds(stage: StageShape, batch: float, context: float) -> float:
    """Return the time of one decode step of `batch` sequences with `context` tokens each, on one stage.

    The products overlap with reading the weights (weights/TP over memory bandwidth, 2 FLOPs per parameter and sequence
    over the peak); attention reads all keys and values after them, hence the sum. It meets the Helix (ASPLOS'25)
    tables of one LLaMA-30B layer from batch 2 to 520 on A100-40 and L4 (docs/cost-model.md has the residuals).
    """
    device = stage.rates
    products = 2 * stage.matrix_parameters * batch / device.prefill_flops
    keys = batch * context * stage.kv_bytes_per_token
    return overlapped(products, weight_seconds(stage)) + keys / device.decode_bytes


def optimizer_seconds(stage: StageShape, shards: int, moved: int = ADAM_BYTES) -> float:
    """Return the time of one Adam update of a shard: `moved` bytes per parameter through memory, and the fixed time."""
    device = stage.rates
    return stage.parameters / shards * moved / device.memory_bytes_per_s + device.overhead.optimizer_step
