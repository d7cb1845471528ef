"""Seconds of training and of inference: micro-batches through unequal pipelines, then the gradient reduction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetrl.cost import formulas
from hetrl.cost.compute import (
    StageShape,
    gradient_bytes,
    optimizer_seconds,
    pass_seconds,
    training_seconds,
    unmultiplied_seconds,
)
from hetrl.cost.hops import hops_of, messages
from hetrl.cost.model import PACKED, CostModel
from hetrl.cost.network import Direction, Ring, all_reduce_seconds, reduction_of, wan_reduction_bytes
from hetrl.cost.packing import nearest, packing
from hetrl.cost.stages import Placed, place_all
from hetrl.hardware import Path, wire_seconds
from hetrl.plan.plan import TaskPlan
from hetrl.workload import ACTOR_TRAINING, OLD_LOGPROBS, Workload


@dataclass(frozen=True)
class Cost:
    """The seconds of one task in an iteration and the bytes that it sends over each direction between sites.

    `scored_bytes` are those of them that a training sends ahead of its steps, where it scores the batch.
    """

    seconds: float
    wan_bytes: Mapping[Direction, float]
    parts: Mapping[str, float]
    scored_bytes: Mapping[Direction, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Times:
    """One micro-batch on one stage: forward and backward with their collectives, and the hop behind the stage."""

    forward: float
    backward: float
    hop: Path | None = None
    hop_bytes: float = 0.0

    @property
    def both(self) -> float:
        """Return f + b."""
        return self.forward + self.backward

    @property
    def hop_transfer(self) -> float:
        """Return bytes / beta of the hop, one direction."""
        return 0.0 if self.hop is None else wire_seconds(self.hop_bytes, self.hop.gbps)

    @property
    def hop_seconds(self) -> float:
        """Return alpha + bytes / beta of the hop, 0 behind the last stage."""
        return 0.0 if self.hop is None else self.hop.delay_ms / 1e3 + self.hop_transfer


def pipeline_seconds(stages: Sequence[Times], micro_batches: int) -> float:
    """Return the time of m micro-batches through these stages, in sequence (`formulas.pipeline_seconds`)."""
    both, back = [stage.both for stage in stages], [stage.backward for stage in stages]
    hops, transfers = [stage.hop_seconds for stage in stages], [stage.hop_transfer for stage in stages]
    return formulas.pipeline_seconds(both, back, hops, transfers, micro_batches)


def micro_batches_of(samples: float, micro_batch: int, stages: int, workload: Workload) -> tuple[int, float]:
    """Return in how many micro-batches a replica's samples pass its stages, and the tokens that each takes time for."""
    packed = packing(workload.response, workload.prompt_tokens, nearest(math.ceil(samples)), micro_batch)
    count = formulas.micro_batch_count(samples, packed.per_sample)
    return count, formulas.micro_batch_tokens(samples * workload.sequence_tokens, count, stages, packed.fullest)


def longest_tokens(workload: Workload, samples: float) -> float:
    """Return the expected tokens of the longest of so many sequences, rounded up to whole ones."""
    return workload.prompt_tokens + workload.response.longest_of(math.ceil(samples))


def uneven(task: TaskPlan, passes: int, workload: Workload) -> float:
    """Return how much longer a pass over the batch in so many parts takes than with equal tokens: `formulas.uneven`."""
    most = max(replica.samples for replica in task.replicas) / passes
    return formulas.uneven(longest_tokens(workload, workload.samples / passes), most * workload.sequence_tokens)


def training_cost(name: str, task: TaskPlan, model: CostModel, sharing: Mapping[Direction, int]) -> Cost:
    """Return the seconds of one iteration's training: every optimiser step of every epoch.

    A step: the slowest replica's pipeline, what is left of the reduction over the replicas behind the last backward
    passes, and the update. The reduction begins when the first stages of all replicas are in theirs. Replicas have
    equal tokens for equal shares, as far as the longest sequence allows (`uneven`). Ahead of the steps, if not beside
    the inferences, the actor's trainer scores the batch where `Workload.scores_batch`: part `old_logprobs`. `sharing`
    counts the tasks that use a direction between sites during the steps; each gets an equal part.
    """
    workload, replicas = model.workload, place_all(name, task.replicas, model)
    steps = workload.optimizer_steps_per_iteration
    minibatches = max(steps // workload.epochs, 1)
    samples = [replica.samples for replica in task.replicas]
    hops = hops_of(replicas, samples, model.topology, sharing, back=True)
    memo: dict[object, Times] = {}
    slowest, begins = 0.0, 0.0
    for replica, placed in zip(task.replicas, replicas, strict=True):
        share = replica.samples / minibatches
        micro_batches, tokens = micro_batches_of(share, task.micro_batch, len(placed), workload)
        times = [_times(stage, tokens, task, workload, memo) for stage in hops.shared(placed, replica.samples)]
        seconds = pipeline_seconds(times, micro_batches)
        slowest, begins = max(slowest, seconds), max(begins, seconds - times[0].backward)
    backward = slowest - begins
    slowest *= uneven(task, minibatches, workload)
    rings = gradient_rings(task, replicas, model)
    reduction = reduction_of(model.topology, rings, sharing)
    left = reduction.behind(backward, replicas[0][0].shape.parameters, len(replicas))
    shards = len(replicas) if task.optimizer_sharding == "data_parallel" else 1
    update = max(optimizer_seconds(stage.shape, shards) for placed in replicas for stage in placed)
    parts = {"pipeline": steps * slowest, "reduction": steps * left, "update": steps * update}
    scored = name == ACTOR_TRAINING and workload.scores_batch
    if scored:
        parts[OLD_LOGPROBS] = _forward_seconds(task, replicas, model)
    ahead: defaultdict[Direction, float] = defaultdict(float)
    wan = defaultdict(float, {direction: steps * load for direction, load in wan_reduction_bytes(rings).items()})
    for replica, placed in zip(task.replicas, replicas, strict=True):
        tokens = replica.samples * workload.sequence_tokens
        _add_activations(wan, placed, tokens * steps / minibatches, back=True)
        if scored:
            _add_activations(ahead, placed, tokens, back=False)
    for direction, load in ahead.items():
        wan[direction] += load
    return Cost(sum(parts.values()), dict(wan), parts, dict(ahead))


def _times(stage: Placed, tokens: float, task: TaskPlan, workload: Workload, memo: dict[object, Times]) -> Times:
    key = (stage.shape, stage.peers, stage.hop, tokens)
    if key not in memo:
        memo[key] = micro_batch_times(stage, tokens, task.recompute, workload.attended_tokens)
    return memo[key]


def micro_batch_times(stage: Placed, tokens: float, recompute: str, sequence: float) -> Times:
    """Return the times of one micro-batch of `tokens` tokens on one stage.

    Tensor parallelism adds two all-reduces of the activations per layer and pass (Megatron-LM, arXiv 1909.08053,
    section 3); the fixed time per micro-batch is shared out 1 : 2 between the passes.
    """
    shape = stage.shape
    forward, backward = training_seconds(shape, tokens, sequence, recompute)
    activation = activation_bytes(shape, tokens)
    layer = 2 * all_reduce_seconds(shape.tensor_parallel, activation, stage.peers)
    fixed = shape.rates.overhead.micro_batch / 3
    forward += shape.layers * layer + fixed
    backward += (shape.layers + shape.recomputed(recompute)) * layer + 2 * fixed
    return Times(forward, backward, stage.hop, activation)


def activation_bytes(shape: StageShape, tokens: float) -> float:
    """Return the bytes of the activations between two layers: tokens x hidden, each sent once per hop."""
    return tokens * shape.architecture.hidden * shape.weight_bytes


def _add_activations(loads: dict[Direction, float], placed: Sequence[Placed], tokens: float, back: bool) -> None:
    """Add what hops between sites carry of so many tokens, one way, or `back`, too."""
    for source, target in messages(placed, back):
        if source.site != target.site:
            loads[source.site, target.site] += activation_bytes(source.shape, tokens)


def gradient_rings(task: TaskPlan, replicas: Sequence[tuple[Placed, ...]], model: CostModel) -> list[Ring]:
    """Return the data-parallel rings: one per stage and tensor-parallel rank."""
    if len(replicas) < 2:
        return []
    sharded = task.optimizer_sharding == "data_parallel"
    rings = []
    for stages in zip(*replicas, strict=True):
        shape = stages[0].shape
        size = gradient_bytes(task.gradient_dtype, shape.weight_bytes)
        gradient, parameters = shape.parameters * size, shape.parameters * shape.weight_bytes
        packed, gathered = PACKED[size], model.gathered[shape.weight_bytes]
        for ranks in zip(*(stage.devices for stage in stages), strict=True):
            rings.append(Ring(ranks, gradient, parameters, sharded, packed, gathered))
    return rings


def inference_cost(name: str, task: TaskPlan, model: CostModel) -> Cost:
    """Return the seconds of one forward pass over the iteration's samples: the slowest replica."""
    seconds = _forward_seconds(task, place_all(name, task.replicas, model), model)
    return Cost(seconds, {}, {"forward": seconds})


def _forward_seconds(task: TaskPlan, replicas: Sequence[tuple[Placed, ...]], model: CostModel) -> float:
    """Return the time of a forward pass over the batch on the slowest replica of a task; hops share links and cards."""
    slowest, workload = 0.0, model.workload
    hops = hops_of(replicas, [replica.samples for replica in task.replicas], model.topology, {}, back=False)
    memo: dict[object, float] = {}
    for replica, stages in zip(task.replicas, replicas, strict=True):
        placed = hops.shared(stages, replica.samples)
        key = (replica.samples, tuple((stage.shape, stage.peers, stage.hop) for stage in placed))
        if key not in memo:
            memo[key] = forward_pipeline_seconds(placed, replica.samples, task.micro_batch, workload)
        slowest = max(slowest, memo[key])
    return slowest * uneven(task, 1, workload)


def forward_pipeline_seconds(placed: Sequence[Placed], samples: int, micro_batch: int, workload: Workload) -> float:
    """Return the time of so many samples in micro-batches, forward only, through the stages.

    That of `formulas.forward_seconds`.
    """
    micro_batches, tokens = micro_batches_of(samples, micro_batch, len(placed), workload)
    forward, hops = [], []
    for stage in placed:
        forward.append(forward_pass_seconds(stage, tokens, workload.attended_tokens))
        hops.append(Times(0.0, 0.0, stage.hop, activation_bytes(stage.shape, tokens)))
    return formulas.forward_seconds(
        forward,
        [hop.hop_seconds for hop in hops],
        [hop.hop_transfer for hop in hops],
        micro_batches,
        placed[0].shape.rates.overhead.inference_call,
    )


def forward_pass_seconds(stage: Placed, tokens: float, sequence: float) -> float:
    """Return the time of one micro-batch on one stage, forward only.

    Products and what the trainer does beside them, two all-reduces per layer, a third of the fixed time of a
    micro-batch that is trained on.
    """
    return pass_seconds(stage.shape, tokens, sequence) + beside_products_seconds(stage, tokens)


def beside_products_seconds(stage: Placed, tokens: float) -> float:
    """Return what of `forward_pass_seconds` is no product: linear in tokens and in layers."""
    shape = stage.shape
    reduce = all_reduce_seconds(shape.tensor_parallel, activation_bytes(shape, tokens), stage.peers)
    return unmultiplied_seconds(shape, tokens) + 2 * shape.layers * reduce + shape.rates.overhead.micro_batch / 3


def steps_seconds(training: Cost) -> float:
    """Return the time of a training's steps, without that of scoring the batch ahead of them."""
    return training.seconds - training.parts.get(OLD_LOGPROBS, 0.0)


def beside(slowed: Cost, alone: Cost, first: float) -> Cost:
    """Return the cost of a training that shares its links until the first training has ended."""
    steps = steps_seconds(slowed)
    if steps <= first or math.isinf(steps):
        return slowed
    part = first / steps
    parts = {name: part * seconds + (1 - part) * alone.parts[name] for name, seconds in slowed.parts.items()}
    seconds = formulas.shared_seconds(first, steps, steps_seconds(alone))
    return replace(slowed, seconds=slowed.seconds - steps + seconds, parts=parts)
