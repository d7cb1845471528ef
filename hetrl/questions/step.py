"""One optimiser step of one model alone on equal GPUs, in one layout: its seconds and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from hetrl.cost.compute import ADAM_BYTES, StageShape, gradient_bytes, layer_activation_bytes, optimizer_seconds
from hetrl.cost.efficiency import OURS, Efficiencies, Rates, calibrated
from hetrl.cost.memory import head_bytes, training_active_bytes
from hetrl.cost.network import Reduction, Ring, path, reduction_of, slowest
from hetrl.cost.stages import Placed
from hetrl.cost.training import micro_batch_times, pipeline_seconds
from hetrl.errors import UsageError
from hetrl.gpus import gpu_type
from hetrl.hardware import Device, Node, Site, Topology
from hetrl.workload import Architecture

STEP_TOKENS = 524_288  # per optimiser step unless samples are given: half a million, as pre-training recipes take,
STEP_TOKENS_PER_GPU = 8192  # and more on many GPUs
NODE_GPUS = 8
LOGIT_BYTES = 6  # per logit of a trainer that holds them all: bf16, and its fp32 gradient
CHUNKED = ("prime-rl",)  # published trainers that make the loss by chunks of logits, as ours does
_NVLINK_GBPS = 1000  # boards with faster lanes than any PCIe
_FABRIC_GBPS = 200  # per GPU: one network card for each, as DGX and HGX systems are built
_ETHERNET_GBPS = 100


@dataclass(frozen=True)
class Parallelism:
    """How the GPUs share the work. Sharding `full` is FSDP (ZeRO-3), `optimizer` ZeRO-1.

    `offload` keeps the optimiser (and with `all` weights and gradients) in host memory.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batch: int
    recompute: str
    sharding: str
    offload: str


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter of the `state` of Adam, of weights and gradients `beside` it, and `moved` by an update."""

    state: int
    beside: int
    moved: int


PRECISIONS = {
    "fp32": Precision(12, 6, ADAM_BYTES),  # bf16 weights, fp32 gradients, master and moments (see ADAM_BYTES)
    "bf16": Precision(4, 4, 14),  # all in bf16: weights, gradients and two moments, without a master; reads 8, writes 6
}


@dataclass(frozen=True)
class SoloTraining:
    """What is asked, of GPUs with these efficiencies: None leaves a choice to the search.

    `trainer` is a published one or ours, `optimizer_dtype` a key of `PRECISIONS`.
    """

    architecture: Architecture
    gpu: str
    gpus: int
    sequence: int
    samples: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    micro_batch: int | None = None
    recompute: str | None = None
    sharding: str | None = None
    offload: str | None = None
    trainer: str = OURS
    optimizer_dtype: str = "fp32"
    gradient_dtype: str | None = None  # None: bf16 with full sharding (FSDP's reduce_dtype), else fp32
    node_gpus: int = NODE_GPUS
    nic_gbps: float | None = None
    efficiencies: Efficiencies = field(default_factory=calibrated)

    @cached_property
    def rates(self) -> Rates:
        """Return the effective rates of the GPUs under the trainer."""
        return self.efficiencies.rates_under(self.gpu, self.trainer)

    @property
    def precision(self) -> Precision:
        """Return the bytes per parameter."""
        return PRECISIONS[self.optimizer_dtype]


@dataclass(frozen=True)
class OptimizerStep:
    """One optimiser step of a layout."""

    layout: Parallelism
    seconds: float
    tokens: float
    parts: dict[str, float]
    memory_gb: float


def one_site(gpu: str, gpus: int, node_gpus: int, nic_gbps: float | None = None) -> Topology:
    """Return a site of equal nodes, as a question about a number of GPUs means it; UsageError for several slices."""
    size, entry = min(gpus, node_gpus), gpu_type(gpu)
    if entry.slice_of and gpus > 1:
        raise UsageError(f"{gpu} is a slice of {entry.slice_of}, which works alone; ask about 1 of them, or whole GPUs")
    fast = entry.peer_gbps > _NVLINK_GBPS
    nic = nic_gbps or (size * _FABRIC_GBPS if fast else _ETHERNET_GBPS)
    count = -(-gpus // size)
    return Topology((Site("site", tuple(Node(f"n{index}", gpu, size, nic_gbps=nic) for index in range(count))),))


@lru_cache(maxsize=1024)
def even_stages(model: Architecture, rates: Rates, tensor: int, pipeline: int) -> tuple[StageShape, ...]:
    """Return the stages of a pipeline that shares out the layers as evenly as whole ones allow."""
    bounds = [model.layers * index // pipeline for index in range(pipeline + 1)]
    last = pipeline - 1
    return tuple(
        StageShape(model, bounds[i + 1] - bounds[i], i == 0, i == last, True, tensor, rates) for i in range(pipeline)
    )


def memory_gb(asked: SoloTraining, layout: Parallelism) -> float:
    """Return the memory of the fullest GPU: state, activations and logits; stage i of p holds p-i micro-batches."""
    shapes = even_stages(asked.architecture, asked.rates, layout.tensor, layout.pipeline)
    tokens = layout.micro_batch * asked.sequence
    sizes = []
    for index, shape in enumerate(shapes):
        active = _active_bytes(asked.trainer, shape, layout.pipeline - index, tokens, layout.recompute)
        sizes.append(_state_bytes(asked.precision, shape, layout) + active)
    return max(sizes) / 1e9


def _active_bytes(trainer: str, shape: StageShape, in_flight: int, tokens: float, recompute: str) -> float:
    """Return the bytes of activations and logits: as our engine keeps them, or as a published trainer does.

    Full recomputation keeps the input of each layer, and one layer's activations at a time. Most hold all logits.
    """
    if trainer == OURS:
        return training_active_bytes(shape, in_flight, tokens, recompute)
    layer = layer_activation_bytes(shape)
    inputs = shape.architecture.hidden * shape.weight_bytes / shape.tensor_parallel
    kept = shape.layers * (inputs if recompute == "full" else layer)
    working = layer if recompute == "full" else 0.0
    passes = tokens * (in_flight * kept + working)
    if trainer in CHUNKED or not (shape.last and shape.head):
        return passes + head_bytes(shape, tokens, training=True)
    return passes + tokens * shape.architecture.vocabulary * LOGIT_BYTES / shape.tensor_parallel


def _state_bytes(precision: Precision, shape: StageShape, layout: Parallelism) -> float:
    """Return weights, gradients and optimiser on one GPU.

    Full sharding divides all by DP and holds two gathered layers and the embeddings beside (PyTorch FSDP prefetches one
    unit); ZeRO-1 divides the state of Adam. Offloading the optimiser leaves bf16 weights and gradients, offloading all
    leaves two layers of both in transit.
    """
    layers = 2 * shape.architecture.layer_parameters / shape.tensor_parallel
    whole = layers + shape.parameters - shape.layers * layers / 2
    shards = layout.data if layout.sharding != "none" else 1
    if layout.offload == "all":
        return 4 * whole
    state, beside = (0, 4) if layout.offload == "optimizer" else (precision.state, precision.beside)
    if layout.sharding == "full":
        return (state + beside) * shape.parameters / shards + 4 * whole
    return shape.parameters * (beside + state / shards)


def step(asked: SoloTraining, layout: Parallelism, topology: Topology) -> OptimizerStep:
    """Return the seconds of one optimiser step: micro-batches, reduction, update, and what is moved to the host."""
    micro = layout.micro_batch * asked.sequence
    if asked.samples is None:
        wanted = max(STEP_TOKENS, STEP_TOKENS_PER_GPU * asked.gpus)
        count = max(round(wanted / (layout.data * micro)), 1)
        tokens = float(count * layout.data * micro)
    else:
        count = -(-asked.samples // (layout.data * layout.micro_batch))
        tokens = float(asked.samples * asked.sequence)
    placed = _placed(asked, layout, topology)
    times = [micro_batch_times(stage, micro, layout.recompute, asked.sequence) for stage in placed]
    compute = pipeline_seconds(times, count)
    waited = count * _exposed_seconds(asked, layout, placed[0].shape, topology, compute / count)
    reduced = _reduction(asked, layout, topology)
    reduction = reduced.behind(times[0].backward, placed[0].shape.parameters, layout.data)
    shards = layout.data if layout.sharding != "none" else 1
    update = max(optimizer_seconds(stage.shape, shards, asked.precision.moved) for stage in placed)
    host = 0.0
    if layout.offload != "none":  # the state of Adam in and out, both directions at once
        largest = max(stage.shape.parameters for stage in placed)
        host = asked.precision.state * largest / shards / asked.rates.host_bytes_per_s
    busy = count * max(one.both for one in times)
    parts = {
        "compute": busy,
        "pipeline": compute - busy,
        "communication": waited + reduction,
        "update": update,
        "host transfer": host,
    }
    return OptimizerStep(layout, sum(parts.values()), tokens, parts, memory_gb(asked, layout))


def _devices(layout: Parallelism, topology: Topology, stage: int) -> list[tuple[Device, ...]]:
    """Return the tensor-parallel ranks of each replica in a stage: Megatron's order, tensor, data, pipeline."""
    first = stage * layout.data * layout.tensor
    ranks = topology.devices[first : first + layout.data * layout.tensor]
    return [ranks[start : start + layout.tensor] for start in range(0, len(ranks), layout.tensor)]


def _placed(asked: SoloTraining, layout: Parallelism, topology: Topology) -> list[Placed]:
    shapes = [
        replace(shape, logits_again=asked.trainer == OURS)
        for shape in even_stages(asked.architecture, asked.rates, layout.tensor, layout.pipeline)
    ]
    ranks = [_devices(layout, topology, index)[0] for index in range(layout.pipeline)]
    hops = [path(topology, a[0], b[0]) for a, b in pairwise(ranks)]
    return [
        Placed(shape, own, slowest(topology, own), hop)
        for shape, own, hop in zip(shapes, ranks, [*hops, None], strict=True)
    ]


def _gradient_bytes(asked: SoloTraining, layout: Parallelism) -> int:
    default = "bf16" if layout.sharding == "full" else "fp32"
    return gradient_bytes(asked.gradient_dtype or default, 2)


def _reduction(asked: SoloTraining, layout: Parallelism, topology: Topology) -> Reduction:
    if layout.data == 1 or layout.sharding == "full":
        return Reduction(0.0, 0.0)
    gradient = _gradient_bytes(asked, layout)
    sharded = layout.sharding == "optimizer"
    rings = []
    for index, shape in enumerate(even_stages(asked.architecture, asked.rates, layout.tensor, layout.pipeline)):
        for ring in zip(*_devices(layout, topology, index), strict=True):
            rings.append(Ring(ring, shape.parameters * gradient, shape.parameters * 2, sharded))
    return reduction_of(topology, rings, {})


def _exposed_seconds(
    asked: SoloTraining, layout: Parallelism, shape: StageShape, topology: Topology, compute: float
) -> float:
    """Return what a micro-batch waits for weights and gradients that are sharded or live on the host.

    Full sharding gathers the weights before the forward and again before the backward and scatters the gradients: three
    collectives of (n-1)/n of their bytes. They run beside the products; `exposed` of the hidden part still shows,
    since both need memory and streaming multiprocessors. Offloaded weights come twice over PCIe, with the gradients.
    """
    moved = 0.0
    if layout.sharding == "full" and layout.data > 1:
        weights, gradient = shape.parameters * 2, shape.parameters * _gradient_bytes(asked, layout)
        rings = [Ring(ring, 2 * weights, gradient, True) for ring in zip(*_devices(layout, topology, 0), strict=True)]
        moved = reduction_of(topology, rings, {}).seconds
    if layout.offload == "all":
        moved = max(moved, 6 * shape.parameters / asked.rates.host_bytes_per_s)
    return max(moved - compute, 0.0) + asked.efficiencies.exposed * min(moved, compute)
