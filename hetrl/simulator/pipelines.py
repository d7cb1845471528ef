"""Training and inference, micro-batch by micro-batch: stages compute, channels carry, rings reduce.

where the batch is scored first: every replica its part of it, forward only
for each optimiser step:
    every replica: its part of the minibatch, dealt as the engine does (`hetrl.dealing`), in micro-batches through 1F1B
    the first stage, beside its last backward pass: reduce all buckets of gradients but the last one
    every stage, behind its last backward pass: reduce what is left
    when all stages are reduced: gather what is sharded, update
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hetrl.cost.compute import optimizer_seconds
from hetrl.cost.formulas import bucket_count, ring_gather_bytes, ring_reduce_bytes
from hetrl.cost.model import CostModel
from hetrl.cost.network import Ring, by_site, wan_phases
from hetrl.cost.stages import Placed, place_all
from hetrl.cost.training import activation_bytes, forward_pass_seconds, gradient_rings, micro_batch_times
from hetrl.dealing import micro_batches, over_replicas
from hetrl.hardware import Device, Topology
from hetrl.plan.plan import TaskPlan
from hetrl.simulator.events import Clock, Process, Signal
from hetrl.simulator.noise import Noise
from hetrl.simulator.trace import Recorder
from hetrl.simulator.wires import Channel, Network, Transfer, gateway
from hetrl.workload import ACTOR_TRAINING

FORWARD, BACKWARD = "forward", "backward"
SCORE = "score"  # what a trace calls the forwards of a training that come ahead of its steps


@dataclass(frozen=True)
class Setting:
    """What every part of one simulation shares."""

    model: CostModel
    clock: Clock
    network: Network
    recorder: Recorder
    noise: Noise = field(default_factory=Noise)


@dataclass(frozen=True)
class MicroBatch:
    """Its tokens, and the length of the sequence that a token of it is in, on average over the tokens."""

    tokens: float
    sequence: float


def deal(responses: Sequence[int], task: TaskPlan, prompt_tokens: int) -> list[list[MicroBatch]]:
    """Return each replica's micro-batches of samples with these response lengths.

    In a pipeline all are filled up to the longest: its stages exchange tensors of one shape.
    """
    lengths = [prompt_tokens + response for response in responses]
    parts, dealt = over_replicas(lengths, [replica.samples for replica in task.replicas]), []
    for replica, part in zip(task.replicas, parts, strict=True):
        cut = [[lengths[i] for i in micro] for micro in micro_batches(part, lengths, task.micro_batch) if micro]
        width = max(map(sum, cut), default=0) if len(replica.stages) > 1 else 0
        dealt.append([_micro_batch(micro, width) for micro in cut])
    return dealt


def _micro_batch(lengths: Sequence[int], width: int) -> MicroBatch:
    """Return the micro-batch of these sequences; what fills it up to `width` tokens is a sequence of its own."""
    filled = [*lengths, max(width - sum(lengths), 0)]
    return MicroBatch(sum(filled), sum(length * length for length in filled) / sum(filled))


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield the passes of one stage in their order: p-1-i forwards, then one of each, then the backwards left.

    Source: PipeDream-flush (arXiv 2006.09503, section 2.2), Megatron-core's schedule without interleaving.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    yield from ((FORWARD, index) for index in range(ahead))
    for index in range(micro_batches - ahead):
        yield FORWARD, ahead + index
        yield BACKWARD, index
    yield from ((BACKWARD, index) for index in range(micro_batches - ahead, micro_batches))


@dataclass(eq=False)
class Pipeline:
    """One replica of a training or of a forward-only task; a trace calls its forwards `word`."""

    setting: Setting
    name: str
    task: TaskPlan
    placed: tuple[Placed, ...]
    training: bool
    word: str = FORWARD
    _down: list[Channel] = field(init=False)
    _up: list[Channel] = field(init=False)
    _seconds: dict[tuple[int, MicroBatch], dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Connect each stage with the next one, both ways."""
        ends = [(a.devices[0], b.devices[0]) for a, b in pairwise(self.placed)]
        network = self.setting.network
        self._down = [Channel(network, a, b, f"{self.name} activations") for a, b in ends]
        self._up = [Channel(network, b, a, f"{self.name} gradients") for a, b in ends]

    def start(self, micro: Sequence[MicroBatch]) -> list[tuple[Signal, Signal]]:
        """Run the micro-batches; returns for each stage the signals that its last pass begins and that it has ended."""
        count = len(self.placed)
        begins = [Signal() for _ in range(count)]
        arrivals = [
            {(kind, j): Signal() for kind in (FORWARD, BACKWARD) for j in range(len(micro))} for _ in range(count)
        ]
        for j in range(len(micro)):
            arrivals[0][FORWARD, j].fire()
            arrivals[-1][BACKWARD, j].fire()  # its own forward comes before it in the order
        stages = (self._stage(index, micro, arrivals, begins[index]) for index in range(count))
        return [(begin, self.setting.clock.start(stage)) for begin, stage in zip(begins, stages, strict=True)]

    def _stage(
        self, index: int, micro: Sequence[MicroBatch], arrivals: Sequence[dict[tuple[str, int], Signal]], last: Signal
    ) -> Process:
        stage, count, clock = self.placed[index], len(self.placed), self.setting.clock
        kinds = [*one_forward_one_backward(count, index, len(micro))]
        passes = kinds if self.training else [(FORWARD, j) for j in range(len(micro))]
        for kind, j in passes:
            yield arrivals[index][kind, j]
            if (kind, j) == passes[-1]:
                last.fire()
            seconds = self.setting.noise.perturbed(self._pass_seconds(index, micro[j])[kind])
            word = self.word if kind == FORWARD else kind
            self.setting.recorder.on_devices(stage.devices, f"{word} {j}", self.name, clock.now, seconds)
            yield seconds
            size = activation_bytes(stage.shape, micro[j].tokens)
            if kind == FORWARD and index + 1 < count:
                self._down[index].send(size).then(arrivals[index + 1][kind, j].fire)
            elif kind == BACKWARD and index > 0:
                self._up[index - 1].send(size).then(arrivals[index - 1][kind, j].fire)

    def _pass_seconds(self, index: int, micro: MicroBatch) -> dict[str, float]:
        key = (index, micro)
        if key not in self._seconds:
            stage = self.placed[index]
            if self.training:
                times = micro_batch_times(stage, micro.tokens, self.task.recompute, micro.sequence)
                self._seconds[key] = {FORWARD: times.forward, BACKWARD: times.backward}
            else:
                self._seconds[key] = {FORWARD: forward_pass_seconds(stage, micro.tokens, micro.sequence)}
        return self._seconds[key]


def inference(setting: Setting, name: str, task: TaskPlan, batch: Sequence[int], word: str = FORWARD) -> Process:
    """Run one forward pass over a batch (the response length of each sample)."""
    replicas = place_all(name, task.replicas, setting.model)
    running = []
    for placed, micro in zip(replicas, deal(batch, task, setting.model.workload.prompt_tokens), strict=True):
        running.append(setting.clock.start(_call(Pipeline(setting, name, task, placed, False, word), micro)))
    yield from running


def _call(pipeline: Pipeline, micro: Sequence[MicroBatch]) -> Process:
    if micro:
        yield pipeline.placed[0].shape.rates.overhead.inference_call
        yield from [ends for _, ends in pipeline.start(micro)]


def scoring(setting: Setting, task: TaskPlan, batch: Sequence[int]) -> Process:
    """Let the actor's trainer score a batch, ahead of its steps."""
    yield from inference(setting, ACTOR_TRAINING, task, batch, SCORE)


def training(setting: Setting, name: str, task: TaskPlan, batch: Sequence[int]) -> Process:
    """Take every optimiser step on a batch (the response length of each sample)."""
    replicas = place_all(name, task.replicas, setting.model)
    pipelines = [Pipeline(setting, name, task, placed, True) for placed in replicas]
    rings = {ring.devices[0].id: ring for ring in gradient_rings(task, replicas, setting.model)}
    workload = setting.model.workload
    steps = workload.optimizer_steps_per_iteration
    parts = max(steps // workload.epochs, 1)
    minibatches = [batch[part * len(batch) // parts : (part + 1) * len(batch) // parts] for part in range(parts)]
    dealt = [deal(minibatch, task, workload.prompt_tokens) for minibatch in minibatches]
    for step in range(steps):
        first = workload.prompt_tokens + minibatches[step % parts][0]
        idle = [MicroBatch(first, first)]  # of a replica that has no samples of the minibatch
        passes = [pipeline.start(micro or idle) for pipeline, micro in zip(pipelines, dealt[step % parts], strict=True)]
        yield from [
            setting.clock.start(_reduce(setting, name, column, signals, rings))
            for column, signals in zip(zip(*replicas, strict=True), zip(*passes, strict=True), strict=True)
        ]
        yield from _update(setting, name, task, replicas)


def _reduce(
    setting: Setting,
    name: str,
    column: Sequence[Placed],
    passes: Sequence[tuple[Signal, Signal]],
    rings: dict[str, Ring],
) -> Process:
    """Reduce the gradients of one stage over its replicas, beside their last backward passes, and gather parameters.

    Megatron-core makes one bucket of each stage but the first: it is reduced while the earlier stages go on.
    """
    label = f"{name} reduction"
    own = [rings[device.id] for device in column[0].devices if device.id in rings]
    shape = column[0].shape
    last = 1 / bucket_count(shape.parameters, len(column)) if shape.first else 1.0  # what the end of the pass makes

    def phase(number: int, share: float) -> list[Signal]:
        return [setting.clock.start(ring_phase(setting, ring, number, share, label)) for ring in own]

    yield from [begins for begins, _ in passes]
    beside = phase(0, 1 - last) if last < 1 else []
    yield from [ends for _, ends in passes]
    began = setting.clock.now
    yield from beside
    yield from phase(0, last)
    yield from phase(1, 1.0)
    for stage in column:
        setting.recorder.on_devices(stage.devices, "reduce", name, began, setting.clock.now - began)


def ring_phase(setting: Setting, ring: Ring, number: int, share: float, label: str) -> Process:
    """Reduce (0) a share of the gradients round one ring, or gather (1) its parameters: inside sites and between them.

    The chunks of a ring follow each other, so that all edges work at once; what is left over is the start-up, k-1
    delays of k ranks of a site and one between sites, twice where gradients are gathered, too. Bytes per edge: those of
    a rank (`formulas.ring_reduce_bytes`, `formulas.ring_gather_bytes`), `wan_phases` between sites.
    Source: ring bounds of Thakur et al., IJHPCA 2005, section 4.
    """
    trips = (1 if ring.sharded else 2, 1 if ring.sharded else 0)[number]
    sites = by_site(ring.devices)
    transfers: list[Transfer] = []
    local_delays = far_delays = 0.0
    for members in sites.values() if trips else ():
        ordered = sorted(members, key=lambda device: device.node)  # the ring crosses each node's edge once
        reduced = ring_reduce_bytes(len(ordered), ring.gradient_bytes, ring.sharded)
        gathered = ring_gather_bytes(len(ordered), ring.parameter_bytes, ring.sharded)
        edges = [*pairwise([*ordered, ordered[0]])] if len(ordered) > 1 else []
        transfers += [setting.network.send(a, b, share * (reduced, gathered)[number], label) for a, b in edges]
        delays = [_delay_seconds(setting.model.topology, a, b) for a, b in edges]
        # the transfers have one of the delays themselves, here and between sites
        local_delays = max(local_delays, (trips * (len(ordered) - 1) - 1) * max(delays, default=0.0))
    for (source, target), size in wan_phases([ring])[number].items():
        if size > 0:
            first, other = (gateway(setting.model.topology, sites[site]) for site in (source, target))
            transfers.append(setting.network.send(first, other, share * size, label))
            delay = _delay_seconds(setting.model.topology, first, other)
            far_delays = max(far_delays, (trips - 1) * delay)
    yield from [transfer.arrived for transfer in transfers]
    yield local_delays + far_delays


def _delay_seconds(topology: Topology, source: Device, target: Device) -> float:
    path = topology.path(source, target)
    return path.delay_ms / 1e3 if path else 0.0


def _update(setting: Setting, name: str, task: TaskPlan, replicas: Sequence[tuple[Placed, ...]]) -> Process:
    """Update all parameters; the next step begins when the slowest rank is done."""
    shards = len(replicas) if task.optimizer_sharding == "data_parallel" else 1
    slowest = 0.0
    for stage in (stage for placed in replicas for stage in placed):
        seconds = optimizer_seconds(stage.shape, shards)
        setting.recorder.on_devices(stage.devices, "update", name, setting.clock.now, seconds)
        slowest = max(slowest, seconds)
    yield slowest
