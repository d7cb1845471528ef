"""Bytes on each device: weights, gradients, optimiser, activations, logits, keys and values; resident against active.

A device holds what every task on it keeps resident plus the largest active set, since tasks of one group never run at
the same time. 1 GB = 1e9 bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hetrl.cost.compute import StageShape, gradient_bytes, layer_activation_bytes, unmultiplied_bytes
from hetrl.cost.model import CostModel
from hetrl.cost.stages import stage_shape
from hetrl.plan.plan import Plan, Replica, TaskPlan, node_of
from hetrl.workload import ACTOR_GENERATION, HEAD_CHUNK_BYTES, TRAININGS, Workload

BATCHED_TOKENS = 8192  # vLLM's max_num_batched_tokens for its profiling run (documentation, engine arguments)
BLOCK_TOKENS = 32  # of vLLM's KV cache on a CPU, as we start it; 16 on a GPU (documentation, engine arguments)
LOGIT_BYTES_FORWARD = 4  # a rollout engine's fp32 log-probabilities


@dataclass(frozen=True)
class Footprint:
    """What one task needs on one device: `resident` always, `active` while it runs, `host` in the node's memory."""

    resident_gb: float
    active_gb: float
    host_gb: float = 0.0

    @property
    def total_gb(self) -> float:
        """Return resident plus active."""
        return self.resident_gb + self.active_gb


def training_state_bytes(shape: StageShape, shards: int, gradient_dtype: str) -> tuple[float, float]:
    """Return the bytes of weights with gradients, and of the optimiser, on one rank.

    bf16: 2 + 4, and 12 of Adam (fp32 master, two moments): 18 B per parameter, sharded 6 + 12/DP; gradients in bf16
    take 2 instead of 4. fp32 needs no master copy: 4 + 4 and 8. Source: ZeRO (arXiv 1910.02054) section 3.1;
    Megatron's distributed optimiser (documentation).
    """
    optimizer = 12 if shape.weight_bytes == 2 else 8
    gradient = gradient_bytes(gradient_dtype, shape.weight_bytes)
    return shape.parameters * (shape.weight_bytes + gradient), shape.parameters * optimizer / shards


def update_bytes(shape: StageShape, shards: int, gradient_dtype: str) -> float:
    """Return what one rank holds beside its state during an update: bf16 gradients in fp32, which Adam takes.

    They are those of the rank's share of the optimiser, and stand where the activations stood. Source: Megatron-core's
    `_copy_model_grads_to_main_grads`.
    """
    copied = 4 if gradient_bytes(gradient_dtype, shape.weight_bytes) == 2 else 0
    return shape.parameters * copied / shards


def kept_layer_bytes(shape: StageShape) -> float:
    """Return the bytes per token that a layer of our training engine keeps for its backward pass, on one rank.

    Inputs of norms and products (4 h); query, key and value as they come, the query again, both rotated, and what
    attention gives; the gate's input and what it gives. With tensor parallelism they are split, as sequence parallelism
    does (arXiv 2205.05198); sines and cosines, of query and of key, are not. Held against the engine by
    `make bench-memory`.
    """
    model = shape.architecture
    values = 4 * model.hidden + model.head_dim * (4 * model.heads + 3 * model.kv_heads)
    values += (3 if model.gated_mlp else 2) * model.intermediate
    return (values / shape.tensor_parallel + 4 * model.head_dim) * shape.weight_bytes


def kept_bytes(shape: StageShape, in_flight: int, tokens: float, recompute: str) -> float:
    """Return the bytes that `in_flight` micro-batches keep between their passes; of a recomputed layer its input."""
    inputs = shape.architecture.hidden * shape.weight_bytes / shape.tensor_parallel
    again = shape.recomputed(recompute)
    layer = kept_layer_bytes(shape) - (unmultiplied_bytes(shape) if recompute == "selective" else 0.0)
    return tokens * in_flight * (again * inputs + (shape.layers - again) * layer)


def head_bytes(shape: StageShape, tokens: float, training: bool) -> float:
    """Return what the output layer needs while it makes log-probs of `tokens` tokens; nothing but on the last stage.

    Two copies of a chunk of float32 logits, or in the backward pass half of one and twice the weights' gradient; and
    the hidden states of all tokens with their gradient, which are not split. Source: `hetrl.runtime.rl.logprob`.
    """
    if not (shape.last and shape.head):
        return 0.0
    model = shape.architecture
    columns = model.vocabulary / shape.tensor_parallel
    chunk = min(4 * tokens * columns, HEAD_CHUNK_BYTES)
    gradient = columns * model.hidden * shape.weight_bytes
    logits = max(2 * chunk, chunk / 2 + 2 * gradient) if training else 2 * chunk
    return logits + 2 * tokens * model.hidden * shape.weight_bytes


def working_bytes(shape: StageShape, tokens: float, recompute: str) -> float:
    """Return what the passes of one micro-batch need beside what is kept: the output layer, or a layer's temporaries.

    A backward pass has about half a layer of them; recomputation has that layer's activations as well, and its own,
    when what the layers behind it kept is free again.
    """
    again = shape.recomputed(recompute)
    layers = max(2.0 - (shape.layers - again), 0.5) if again else 0.5
    return max(layers * tokens * kept_layer_bytes(shape), head_bytes(shape, tokens, training=True))


def embedding_bytes(shape: StageShape) -> float:
    """Return what the input embedding's backward needs on the first stage: its dense gradient, twice.

    It is the end of a micro-batch's backward pass, which keeps nothing any more.
    """
    gradient = shape.architecture.embedding_parameters * shape.weight_bytes / shape.tensor_parallel
    return 2 * gradient if shape.first else 0.0


def training_active_bytes(shape: StageShape, in_flight: int, tokens: float, recompute: str) -> float:
    """Return the most bytes that the passes need, with `in_flight` micro-batches of `tokens` tokens under way."""
    passes = kept_bytes(shape, in_flight, tokens, recompute) + working_bytes(shape, tokens, recompute)
    return max(passes, kept_bytes(shape, in_flight - 1, tokens, recompute) + embedding_bytes(shape))


def training_footprint(shape: StageShape, task: TaskPlan, index: int, workload: Workload) -> Footprint:
    """Return the footprint of a training task on stage `index`; stage i of p holds (p-i) micro-batches."""
    shards = len(task.replicas) if task.optimizer_sharding == "data_parallel" else 1
    weights, optimizer = training_state_bytes(shape, shards, task.gradient_dtype)
    in_flight = task.pipeline_parallel - index
    tokens = task.micro_batch * workload.max_sequence_tokens
    active = training_active_bytes(shape, in_flight, tokens, task.recompute)
    active = max(active, update_bytes(shape, shards, task.gradient_dtype))
    if task.idle_state == "offload":
        moved = shape.parameters * shape.weight_bytes + optimizer  # gradients are dropped
        return Footprint(0.0, (weights + optimizer + active) / 1e9, moved / 1e9)
    return Footprint((weights + optimizer) / 1e9, active / 1e9)


def inference_active_bytes(shape: StageShape, tokens: float) -> float:
    """Return what a forward pass over `tokens` tokens needs: one layer's activations, or the output layer."""
    return max(tokens * kept_layer_bytes(shape), head_bytes(shape, tokens, training=False))


def inference_footprint(shape: StageShape, task: TaskPlan, workload: Workload) -> Footprint:
    """Return the footprint of a forward-only task: weights, and one micro-batch at a time."""
    weights = shape.parameters * shape.weight_bytes
    active = inference_active_bytes(shape, task.micro_batch * workload.max_sequence_tokens)
    if task.idle_state == "offload":
        return Footprint(0.0, (weights + active) / 1e9, weights / 1e9)
    return Footprint(weights / 1e9, active / 1e9)


def serving_workspace_bytes(shape: StageShape, max_sequences: int, workload: Workload) -> float:
    """Return what a rollout engine needs beside weights and KV cache: one batch of prefill and the sampler's logits."""
    tokens = min(BATCHED_TOKENS, max_sequences * workload.max_sequence_tokens)
    logits = max_sequences * shape.architecture.vocabulary * LOGIT_BYTES_FORWARD if shape.last else 0
    return tokens * layer_activation_bytes(shape) + logits / shape.tensor_parallel


def kv_cache_room_gb(shapes: Iterable[StageShape], max_sequences: int, workload: Workload) -> float:
    """Return the largest KV cache of a replica alone on its devices: what weights and workspace leave of the fullest.

    vLLM gives every device of a replica the same.
    """
    rooms = (
        shape.rates.usable_gb
        - (shape.parameters * shape.weight_bytes + serving_workspace_bytes(shape, max_sequences, workload)) / 1e9
        for shape in shapes
    )
    return max(min(rooms), 0.0)


def least_kv_cache_gb(shapes: Iterable[StageShape], workload: Workload) -> float:
    """Return the KV cache per device below which vLLM does not start: one sequence of full length, in whole blocks.

    One block more is never used. Source: vLLM, `check_enough_kv_cache_memory`.
    """
    tokens = (math.ceil(workload.max_sequence_tokens / BLOCK_TOKENS) + 1) * BLOCK_TOKENS
    return tokens * max(shape.kv_bytes_per_token for shape in shapes) / 1e9


def rollout_shapes(replica: Replica, model: CostModel) -> list[StageShape]:
    """Return the stages of a replica of generation."""
    return [
        stage_shape(ACTOR_GENERATION, replica, index, model.rates(stage.devices[0]), model.workload)
        for index, stage in enumerate(replica.stages)
    ]


def with_server(replica: Replica, cap_gb: float, max_sequences: int, model: CostModel) -> Replica:
    """Return a replica of generation with what its server gets (`server_limits`)."""
    cache_gb, sequences = server_limits(rollout_shapes(replica, model), cap_gb, max_sequences, model.workload)
    return replace(replica, kv_cache_gb=cache_gb, max_sequences=sequences)


def server_limits(
    shapes: Sequence[StageShape], cap_gb: float, max_sequences: int, workload: Workload
) -> tuple[float, int]:
    """Return the KV cache in GB, `cap_gb` or less where there is less room, and as many sequences as it holds.

    What is sent to a full server waits there, where no other replica can draw it.
    """
    cache_gb = min(cap_gb, kv_cache_room_gb(shapes, max_sequences, workload))
    return cache_gb, max(min(held_sequences(cache_gb, shapes, workload), max_sequences), 1)


def held_sequences(cache_gb: float, shapes: Iterable[StageShape], workload: Workload) -> int:
    """Return how many sequences of mean length a KV cache holds: the stage with the most bytes per token decides."""
    return int(cache_gb * 1e9 / max(shape.kv_bytes_per_token for shape in shapes) / workload.sequence_tokens)


def serving_footprint(shape: StageShape, replica: Replica, idle_state: str, workload: Workload) -> Footprint:
    """Return the footprint of generation: weights, KV cache, workspace; `sleep` frees the KV cache, `offload` all."""
    weights = shape.parameters * shape.weight_bytes / 1e9
    working = serving_workspace_bytes(shape, replica.max_sequences, workload) / 1e9
    cache = replica.kv_cache_gb
    if idle_state == "offload":
        return Footprint(0.0, weights + cache + working, weights)
    if idle_state == "sleep":
        return Footprint(weights, cache + working)
    return Footprint(weights + cache, working)


def footprint(
    name: str, task: TaskPlan, replica: Replica, shape: StageShape, index: int, workload: Workload
) -> Footprint:
    """Return what a task needs on each device of stage `index` of a replica."""
    if name == ACTOR_GENERATION:
        return serving_footprint(shape, replica, task.idle_state, workload)
    if name in TRAININGS:
        return training_footprint(shape, task, index, workload)
    return inference_footprint(shape, task, workload)


def task_footprints(name: str, task: TaskPlan, model: CostModel) -> Iterator[tuple[str, Footprint]]:
    """Yield each device of a task with the task's footprint there."""
    memo: dict[object, Footprint] = {}
    for replica in task.replicas:
        server = (replica.kv_cache_gb, replica.max_sequences)
        for index, stage in enumerate(replica.stages):
            rates = model.rates(stage.devices[0])
            layers = (stage.layers[1] - stage.layers[0], stage.recompute_layers)
            key = (rates, index, len(stage.devices), layers, len(replica.stages), server)
            if key not in memo:
                shape = stage_shape(name, replica, index, rates, model.workload)
                memo[key] = footprint(name, task, replica, shape, index, model.workload)
            for device in stage.devices:
                yield device, memo[key]


def device_footprints(plan: Plan, model: CostModel) -> dict[str, dict[str, Footprint]]:
    """Return the footprint of each task on each device that the plan uses."""
    found: defaultdict[str, dict[str, Footprint]] = defaultdict(dict)
    for name, task in plan.tasks.items():
        for device, needs in task_footprints(name, task, model):
            found[device][name] = needs
    return dict(found)


def peak_memory_gb(plan: Plan, model: CostModel) -> dict[str, float]:
    """Return the largest memory of each device that the plan uses: all resident sets plus the largest active one."""
    return {
        device: sum(one.resident_gb for one in needs.values()) + max(one.active_gb for one in needs.values())
        for device, needs in device_footprints(plan, model).items()
    }


def host_memory_gb(plan: Plan, model: CostModel) -> dict[str, float]:
    """Return what offloaded tasks keep in the memory of each node (`site/node`)."""
    host: defaultdict[str, float] = defaultdict(float)
    for device, needs in device_footprints(plan, model).items():
        host[node_of(device)] += sum(one.host_gb for one in needs.values())
    return {node: needed for node, needed in host.items() if needed > 0}
