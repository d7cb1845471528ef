"""Bytes on each device: weights, gradients, optimiser, activations, logits, keys and values; resident against active.

A device holds what every task on it keeps resident plus the largest active set, since tasks of one group never run at
the same time. 1 GB = 1e9 bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hetrl.cost.compute import StageShape, layer_activation_bytes
from hetrl.cost.model import CostModel
from hetrl.cost.stages import stage_shape
from hetrl.plan.plan import Plan, TaskPlan, node_of
from hetrl.workload import ACTOR_GENERATION, TRAININGS, Workload

BATCHED_TOKENS = 8192  # vLLM's max_num_batched_tokens for its profiling run (documentation, engine arguments)
LOGIT_BYTES_TRAINING = 6  # bf16 logits and their fp32 softmax gradient
LOGIT_BYTES_FORWARD = 4  # fp32 log-probabilities


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


def training_state_bytes(shape: StageShape, shards: int) -> tuple[float, float]:
    """Return the bytes of weights with fp32 gradients, and of the optimiser, on one rank.

    bf16: 2 + 4, and 12 of Adam (fp32 master, two moments): 18 B per parameter, sharded 6 + 12/DP. fp32 needs no master
    copy: 4 + 4 and 8. Source: ZeRO (arXiv 1910.02054) section 3.1; Megatron's distributed optimiser (documentation).
    """
    optimizer = 12 if shape.weight_bytes == 2 else 8
    return shape.parameters * (shape.weight_bytes + 4), shape.parameters * optimizer / shards


def training_active_bytes(shape: StageShape, in_flight: int, tokens: float, recompute: str) -> float:
    """Return the bytes of the activations of `in_flight` micro-batches of `tokens` tokens, and of the logits.

    Full recomputation keeps the input of each layer, and one layer's activations at a time.
    """
    layer = layer_activation_bytes(shape)
    inputs = shape.architecture.hidden * shape.weight_bytes / shape.tensor_parallel
    kept = shape.layers * (inputs if recompute == "full" else layer)
    working = layer if recompute == "full" else 0.0
    logits = 0.0
    if shape.last and shape.head:
        logits = shape.architecture.vocabulary * LOGIT_BYTES_TRAINING / shape.tensor_parallel
    return tokens * (in_flight * kept + working + logits)


def training_footprint(shape: StageShape, task: TaskPlan, index: int, workload: Workload) -> Footprint:
    """Return the footprint of a training task on stage `index`; stage i of p holds (p-i) micro-batches."""
    shards = len(task.replicas) if task.optimizer_sharding == "data_parallel" else 1
    weights, optimizer = training_state_bytes(shape, shards)
    in_flight = task.pipeline_parallel - index
    tokens = task.micro_batch * workload.max_sequence_tokens
    active = training_active_bytes(shape, in_flight, tokens, task.recompute)
    if task.idle_state == "offload":
        moved = shape.parameters * shape.weight_bytes + optimizer  # gradients are dropped
        return Footprint(0.0, (weights + optimizer + active) / 1e9, moved / 1e9)
    return Footprint((weights + optimizer) / 1e9, active / 1e9)


def inference_footprint(shape: StageShape, task: TaskPlan, workload: Workload) -> Footprint:
    """Return the footprint of a forward-only task: weights, two layers' activations, log-probabilities."""
    weights = shape.parameters * shape.weight_bytes
    tokens = task.micro_batch * workload.max_sequence_tokens
    active = 2 * tokens * layer_activation_bytes(shape)
    if shape.last and shape.head:
        active += tokens * shape.architecture.vocabulary * LOGIT_BYTES_FORWARD / shape.tensor_parallel
    if task.idle_state == "offload":
        return Footprint(0.0, (weights + active) / 1e9, weights / 1e9)
    return Footprint(weights / 1e9, active / 1e9)


def serving_workspace_bytes(shape: StageShape, max_sequences: int, workload: Workload) -> float:
    """Return what a rollout engine needs beside weights and KV cache: one batch of prefill and the sampler's logits."""
    sequences = max_sequences or workload.samples
    tokens = min(BATCHED_TOKENS, sequences * workload.max_sequence_tokens)
    logits = sequences * shape.architecture.vocabulary * LOGIT_BYTES_FORWARD if shape.last else 0
    return tokens * layer_activation_bytes(shape) + logits / shape.tensor_parallel


def kv_cache_gb(shape: StageShape, task: TaskPlan, workload: Workload) -> float:
    """Return the KV cache of one device: the plan's `kv_cache_gb`, or less where weights and workspace leave less.

    The plan has one figure for all replicas, so it is a cap: a small GPU takes what it has.
    """
    weights = shape.parameters * shape.weight_bytes
    room = shape.rates.usable_gb - (weights + serving_workspace_bytes(shape, task.max_sequences, workload)) / 1e9
    return max(min(task.kv_cache_gb, room), 0.0)


def serving_footprint(shape: StageShape, task: TaskPlan, workload: Workload) -> Footprint:
    """Return the footprint of generation: weights, KV cache, workspace; `sleep` frees the KV cache, `offload` all."""
    weights = shape.parameters * shape.weight_bytes / 1e9
    working = serving_workspace_bytes(shape, task.max_sequences, workload) / 1e9
    cache = kv_cache_gb(shape, task, workload)
    if task.idle_state == "offload":
        return Footprint(0.0, weights + cache + working, weights)
    if task.idle_state == "sleep":
        return Footprint(weights, cache + working)
    return Footprint(weights + cache, working)


def footprint(name: str, task: TaskPlan, shape: StageShape, index: int, workload: Workload) -> Footprint:
    """Return what a task needs on each device of its stage `index`."""
    if name == ACTOR_GENERATION:
        return serving_footprint(shape, task, workload)
    if name in TRAININGS:
        return training_footprint(shape, task, index, workload)
    return inference_footprint(shape, task, workload)


def task_footprints(name: str, task: TaskPlan, model: CostModel) -> Iterator[tuple[str, Footprint]]:
    """Yield each device of a task with the task's footprint there."""
    memo: dict[object, Footprint] = {}
    for replica in task.replicas:
        for index, stage in enumerate(replica.stages):
            rates = model.rates(stage.devices[0])
            key = (rates, index, len(stage.devices), stage.layers[1] - stage.layers[0], len(replica.stages))
            if key not in memo:
                shape = stage_shape(name, replica, index, rates, model.workload)
                memo[key] = footprint(name, task, shape, index, model.workload)
            for device in stage.devices:
                yield device, memo[key]


def peak_memory_gb(plan: Plan, model: CostModel) -> dict[str, float]:
    """Return the largest memory of each device that the plan uses: all resident sets plus the largest active one."""
    resident: defaultdict[str, float] = defaultdict(float)
    active: defaultdict[str, float] = defaultdict(float)
    for name, task in plan.tasks.items():
        for device, needs in task_footprints(name, task, model):
            resident[device] += needs.resident_gb
            active[device] = max(active[device], needs.active_gb)
    return {device: resident[device] + active[device] for device in resident}


def host_memory_gb(plan: Plan, model: CostModel) -> dict[str, float]:
    """Return what offloaded tasks keep in the memory of each node (`site/node`)."""
    host: defaultdict[str, float] = defaultdict(float)
    for name, task in plan.tasks.items():
        for device, needs in task_footprints(name, task, model):
            host[node_of(device)] += needs.host_gb
    return {node: needed for node, needed in host.items() if needed > 0}
