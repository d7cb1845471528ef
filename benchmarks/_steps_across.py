"""What bench `across` tries: a model that stands for 8B, its layouts, links, and what the cost model says of a step."""

from __future__ import annotations

from dataclasses import dataclass

from _across_rank import FORWARD, Step
from _time_dilation import Dilated

from hetrl.cost.model import GATHERED, PACKED
from hetrl.cost.network import Reduction, Ring, reduction_of
from hetrl.cost.training import Times, pipeline_seconds
from hetrl.hardware import Device, Link, Node, Path as Wire, Site, Topology
from hetrl.runtime import wire
from hetrl.workload import ACTOR_TRAINING, architecture
from lab.worlds.gateways import SITES, Shape

SHAPES = (Shape(1.0, 25.0, 0.0), Shape(0.4, 10.0, 0.0), Shape(0.1, 40.0, 0.0))
EIGHT_B = architecture("qwen3-8b")
PARAMETERS = 256_000_000  # of the model that stands for 8B
RATIO = EIGHT_B.parameters / PARAMETERS  # how many times smaller it is
STEP_SECONDS = 300.0  # of 8B
TOKENS = 2**20  # of a step of 8B: what a pipeline sends grows with them
MICRO_BATCHES = 8
CHANGED = 0.012  # of the bf16 values in a step at 1e-6: docs/decisions.md, "Changed words travel as gaps and steps"
GPU = "a100-80gb"

RANKS = [wire.address(site, ACTOR_TRAINING + wire.RANK, 0) for site in SITES]
RANKS.append(wire.address(SITES[-1], ACTOR_TRAINING + wire.RANK, 1))  # two at the last site


@dataclass(frozen=True)
class Layout:
    """The replicas, each with the ranks of its stages."""

    name: str
    replicas: tuple[tuple[int, ...], ...]

    @property
    def stages(self) -> int:
        """Return the number of pipeline stages."""
        return len(self.replicas[0])


LAYOUTS = (
    Layout("data, 2 sites", ((0,), (1,))),
    Layout("data, 3 sites", ((0,), (1,), (2,))),
    Layout("pipeline, 2 sites", ((0, 1),)),
    Layout("pipeline, 3 sites", ((0, 1, 2),)),
    Layout("both, 3 sites", ((0, 2), (1, 3))),
)
SIX_DIRECTIONS = LAYOUTS[1:2]  # full at once


def step_of(layout: Layout, replica: int, stage: int, dilation: int) -> Step:
    """Return what the rank of a stage of a replica does."""
    busy = dilation * STEP_SECONDS / RATIO / MICRO_BATCHES  # of any layout: more ranks stand for slower ones
    activation = TOKENS * EIGHT_B.hidden * 2 / RATIO / MICRO_BATCHES / len(layout.replicas)
    return Step(
        replicas=tuple(ranks[stage] for ranks in layout.replicas),
        stages=layout.replicas[replica],
        parameters=PARAMETERS // layout.stages,
        activation_bytes=int(activation) if layout.stages > 1 else 0,
        micro_batches=MICRO_BATCHES,
        micro_batch_seconds=busy,
        changed=CHANGED,
    )


@dataclass(frozen=True)
class Case:
    """Links, and the layouts that meet them."""

    links: Dilated
    layouts: tuple[Layout, ...] = LAYOUTS


def to_scale(shape: Shape, times: int) -> Dilated:
    """Return links whose delays are RATIO times shorter."""
    return Dilated(shape, times, 1 / RATIO)


CASES = (
    *(Case(Dilated(shape)) for shape in SHAPES),
    # Two cores do not carry both directions at 1 Gbps; where six are full, a dilation twice as long shows by how much.
    Case(to_scale(SHAPES[0], 4)),
    Case(to_scale(SHAPES[1], 2)),
    Case(to_scale(SHAPES[2], 1)),
    Case(to_scale(SHAPES[0], 8), SIX_DIRECTIONS),
    Case(to_scale(SHAPES[1], 4), SIX_DIRECTIONS),
)


def predicted_seconds(layout: Layout, step: Step, shape: Shape, gbps: float) -> tuple[float, float]:
    """Return what the cost model says of a step over these links, and of one inside a site."""
    forward = FORWARD * step.micro_batch_seconds
    hop = Wire(shape.delay_ms, gbps)
    both = [Times(forward, step.micro_batch_seconds - forward, hop, step.activation_bytes) for _ in step.stages]
    apart = [*both[:-1], Times(both[-1].forward, both[-1].backward)]
    near = [Times(one.forward, one.backward) for one in both]
    sites = tuple(Site(name, (Node("n0", GPU, 4),)) for name in SITES)
    pairs = [(a, b) for number, a in enumerate(SITES) for b in SITES[number + 1 :]]
    topology = Topology(sites, tuple(Link(pair, shape.delay_ms, gbps) for pair in pairs))
    size = 2.0 * step.parameters
    rings = []
    for stage in range(layout.stages if len(layout.replicas) > 1 else 0):
        ranks = [replica[stage] for replica in layout.replicas]
        devices = tuple(Device(wire.site_of(RANKS[rank]), "n0", rank, GPU) for rank in ranks)
        rings.append(Ring(devices, size, size, True, PACKED[2], GATHERED[2]))
    reduction = reduction_of(topology, rings, {}) if rings else Reduction(0.0, 0.0)
    left = reduction.behind(both[0].backward, step.parameters, len(layout.replicas))
    return pipeline_seconds(apart, MICRO_BATCHES) + left, pipeline_seconds(near, MICRO_BATCHES)
