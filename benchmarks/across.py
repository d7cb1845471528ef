"""One training over two and three sites: bytes and seconds of an optimiser step, beside what the cost model says.

sites of the lab, a rank each (`_across_rank`); compute is a sleep, what crosses is that of a model RATIO times smaller
than 8B, and a step's compute is 300 s / RATIO: bytes per second of compute are those of 8B. Delays are not scaled, so
they weigh RATIO times as much.
for each shape of the links: measure what a link gives in both directions at once, as all layouts use it; then for each
layout take some steps
predicted = pipeline and reduction of `hetrl.cost` with the measured rate
share = the same step inside one site, as predicted / measured
dilated (`_time_dilation`): compute takes as many times longer as the links

    python benchmarks/across.py                                     # all; writes the result
    python benchmarks/across.py --gbps 1 --layout "data, 2 sites"   # some; prints its part of the page only
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _across_rank import FORWARD, Step
from _results import ROOT, write_result
from _time_dilation import EXPLAINED, Dilated

from hetrl.cost.model import GATHERED, PACKED
from hetrl.cost.network import Reduction, Ring, reduction_of
from hetrl.cost.training import Times, pipeline_seconds
from hetrl.hardware import Device, Link, Node, Path as Wire, Site, Topology
from hetrl.runtime import wire
from hetrl.workload import ACTOR_TRAINING, architecture
from lab.worlds.gateways import SITES, LabSites, Shape, open_lab, order, reply_of

SHAPES = (Shape(1.0, 25.0, 0.0), Shape(0.4, 10.0, 0.0), Shape(0.1, 40.0, 0.0))
CASES = (*map(Dilated, SHAPES), Dilated(SHAPES[0], 4))  # two cores do not carry both directions at 1 Gbps
EIGHT_B = architecture("qwen3-8b")
PARAMETERS = 256_000_000
STEP_SECONDS = 300.0  # of 8B
TOKENS = 2**20  # of a step of 8B: what a pipeline sends grows with them
MICRO_BATCHES = 8
CHANGED = 0.012  # of the bf16 values in a step at 1e-6: docs/decisions.md, "Changed words travel as gaps and steps"
STEPS = 4  # the first one gathers all values, and is not counted
PROBE_MB = 64
BYTES_GOAL, SHARE_GOAL, PREDICTED_GOAL = 0.55, 0.85, 0.10
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


@dataclass(frozen=True)
class Scale:
    """A model of so many parameters that stands for 8B."""

    parameters: int

    @property
    def ratio(self) -> float:
        """Return how many times smaller it is."""
        return EIGHT_B.parameters / self.parameters

    def step(self, layout: Layout, replica: int, stage: int, dilation: int) -> Step:
        """Return what the rank of a stage of a replica does."""
        busy = dilation * STEP_SECONDS / self.ratio / MICRO_BATCHES  # of any layout: more ranks stand for slower ones
        activation = TOKENS * EIGHT_B.hidden * 2 / self.ratio / MICRO_BATCHES / len(layout.replicas)
        return Step(
            replicas=tuple(ranks[stage] for ranks in layout.replicas),
            stages=layout.replicas[replica],
            parameters=self.parameters // layout.stages,
            activation_bytes=int(activation) if layout.stages > 1 else 0,
            micro_batches=MICRO_BATCHES,
            micro_batch_seconds=busy,
            changed=CHANGED,
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


class World:
    """The ranks while links have one shape."""

    def __init__(self, sites: LabSites) -> None:
        command = [sys.executable, str(ROOT / "benchmarks" / "_across_rank.py")]
        setup = [json.dumps(RANKS), json.dumps(sites.endpoints)]
        self._ranks = [sites.start(wire.site_of(one), [*command, *setup, str(rank)]) for rank, one in enumerate(RANKS)]
        self._replies("ready")

    def link_gbps(self, size_mb: int) -> float:
        """Return what a link gives in both directions at once, as the slower one sees it."""
        self._order(["link", size_mb * 10**6])
        return float(min(self._replies()[:2]))

    def steps(self, asked: Sequence[Step]) -> tuple[list[float], dict[str, float]]:
        """Return the seconds of each step but the first, and the bytes of one per direction, over the slowest ranks."""
        self._order(["steps", STEPS, [asdict(one) for one in asked]])
        replies = self._replies()
        seconds = [max(reply[0][number] for reply in replies) for number in range(1, STEPS)]
        sent = {
            f"{wire.site_of(here)}-{there}": total / (STEPS - 1)
            for here, (_, links) in zip(RANKS, replies, strict=True)
            for there, total in links.items()
        }
        return seconds, sent

    def _order(self, what: Any) -> None:
        for process in self._ranks:
            order(process, what)

    def _replies(self, expected: Any = None) -> list[Any]:
        found = [reply_of(process) for process in self._ranks]
        assert expected is None or found == [expected] * len(found)
        return found


def measure(cases: Sequence[Dilated], layouts: Sequence[Layout], scale: Scale) -> list[dict[str, Any]]:
    """Take the steps of every layout in every case."""
    rows = []
    for case in cases:
        with tempfile.TemporaryDirectory() as work, open_lab() as (lab, stack):
            sites = LabSites(lab, Path(work), stack, members=RANKS)
            sites.shape(case.link)
            world = World(sites)
            gbps = world.link_gbps(PROBE_MB)
            for layout in layouts:
                rows.append(measured(world, layout, scale, case, gbps))
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def measured(world: World, layout: Layout, scale: Scale, case: Dilated, link_gbps: float) -> dict[str, Any]:
    """Measure one layout; bytes are of the busiest direction, in multiples of the gradient's of one stage."""
    places = {rank: (r, s) for r, ranks in enumerate(layout.replicas) for s, rank in enumerate(ranks)}
    asked = [scale.step(layout, *places[rank], case.times) for rank in sorted(places)]
    step = asked[layout.replicas[0][0]]
    seconds, sent = world.steps(asked)
    gradient = 2 * step.parameters
    data = len(layout.replicas) > 1
    busiest = max(sent.values())
    predicted, near = predicted_seconds(layout, step, case.link, link_gbps)
    took = statistics.median(seconds)
    return {
        **asdict(case.shape),
        "link": str(case),
        "dilation": case.times,
        "layout": layout.name,
        "ratio": scale.ratio,
        "measured_gbps": link_gbps * case.times,
        "gradient_mb": gradient / 1e6 if data else None,
        "busiest_mb": busiest / 1e6,
        "per_gradient": busiest / gradient if data and layout.stages == 1 else None,
        "seconds": took / case.times,
        "predicted_seconds": predicted / case.times,
        "one_site_seconds": near / case.times,
        "share": near / took,
        "sent_bytes": sent,
        "load_before": os.getloadavg()[0],
    }


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the benchmark's part of the page."""
    data = [row for row in rows if row["layout"] == LAYOUTS[0].name]
    shares = [f"{row['share']:.0%} ({row['link']})" for row in data if row["gbps"] == SHAPES[0].gbps]
    off = [abs(row["predicted_seconds"] / row["seconds"] - 1) for row in rows]
    reached = sum(one <= PREDICTED_GOAL for one in off)
    share = f", {' and '.join(shares)} of one site (to reach: {SHARE_GOAL:.0%})" if shares else ""
    two = f" Two sites, data: {max(row['per_gradient'] for row in data):.2f} n (to reach: {BYTES_GOAL:g} n){share}."
    lines = [
        f"One optimiser step of a training over sites. Compute is a sleep, {STEP_SECONDS:g} s of 8B over the ratio; "
        f"what crosses has the real bytes of a model {rows[0]['ratio']:.0f} times smaller, in bf16, so that both are "
        "to each other as with 8B; delays are not scaled and weigh more than they would. Replicas reduce-scatter "
        f"gradients and gather parameters of which {CHANGED:.1%} change; a pipeline has {MICRO_BATCHES} micro-batches "
        f"of {TOKENS:,} tokens in all. Bytes: of the busiest direction, counted by the gateways; n: those of the "
        "gradient. Share: the same step inside one site, over the one measured. Predicted: `hetrl.cost` with the rate "
        "that transfers in both directions at once got alone, and what is left of the reduction behind the last "
        "backward pass, during which the ranks reduce buckets, as Megatron does. "
        f"{EXPLAINED}{two if data else ''} "
        f"Predicted within {PREDICTED_GOAL:.0%} in {reached} of {len(off)} cases, at worst {max(off):.0%} off (to "
        "reach: all).",
        "",
        "| link | layout | measured Gbps | MB per step | of the gradient | s | predicted | share of one site | load |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        share = "" if row["per_gradient"] is None else f"{row['per_gradient']:.2f} n"
        figures = f"{row['seconds']:.2f} | {row['predicted_seconds']:.2f} | {row['share']:.0%}"
        lines.append(
            f"| {row['link']} | {row['layout']} "
            f"| {row['measured_gbps']:.2f} | {row['busiest_mb']:.0f} | {share} | {figures} | {row['load_before']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all and write the result, or run some and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--gbps", type=float, action="append", choices=[shape.gbps for shape in SHAPES])
    parser.add_argument("--dilation", type=int, action="append", choices=sorted({case.times for case in CASES}))
    parser.add_argument("--layout", action="append", choices=[layout.name for layout in LAYOUTS])
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="of the smaller model")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.gbps is None or case.shape.gbps in arguments.gbps]
    cases = [case for case in cases if arguments.dilation is None or case.times in arguments.dilation]
    layouts = [one for one in LAYOUTS if arguments.layout is None or one.name in arguments.layout]
    rows = measure(cases, layouts, Scale(arguments.parameters))
    if (cases, layouts, arguments.parameters) == ([*CASES], [*LAYOUTS], PARAMETERS):
        write_result("across", {"seed": 0, "rows": rows}, page(rows))
    elif rows:
        print(page(rows))


if __name__ == "__main__":
    main()
