"""Plan for ever more GPUs: cost of an evaluation and quality of the plan, with more nodes per site and with more sites.

for 64, 256, 1,024 and 4,096 GPUs, made of the paper's scenario with eight regions
    nodes: every node as many times at its site, so the device classes stay
    sites: every site as many times, so there are as many times the classes
    sha-ea for so many seconds; gap: iteration / that of the best plan known (benchmarks/data/best_known.json) - 1

The job stays the same. Without FULL=1 (or --full) each search takes 20 s, and more sites end at 1,024 GPUs; with it
60 s and 3 seeds. --best-known searches for 600 s and keeps the plans that beat the best known.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import inf, log
from statistics import median

from _paper_cases import SYNC, Case, Knobs, problem
from _plot import Line, plot
from _results import ROOT, command, write_result
from _search_runs import Known, Run, best_known, best_of, finite, keep, record, run_search, use_one_core, warm_up

from hetrl.describe.yaml_file import read_yaml
from hetrl.hardware import Link, Topology
from hetrl.search import Problem
from hetrl.search.evaluate import Evaluator
from hetrl.search.space import Space

PICTURE = ROOT / "docs" / "images" / "scale.svg"
CASE = ("multi-continent", "qwen3-8b", "grpo", SYNC)
NODES, SITES = "nodes", "sites"
COLOURS = {NODES: "#0072b2", SITES: "#d55e00"}
LONG = ((NODES, 1), (NODES, 4), (NODES, 16), (NODES, 64), (SITES, 4), (SITES, 16), (SITES, 64))
SHORT = LONG[:-1]
GOAL_GPUS, GOAL_GAP = 1024, 0.03


def more_nodes(topology: Topology, factor: int) -> Topology:
    """Return the topology with every node so many times at its site."""
    sites = tuple(
        replace(site, nodes=tuple(replace(n, name=f"{n.name}-{index}") for n in site.nodes for index in range(factor)))
        for site in topology.sites
    )
    return replace(topology, sites=sites)


def more_sites(topology: Topology, factor: int) -> Topology:
    """Return the topology with every site so many times; copies of one site are linked as the nearest two sites."""
    near = max(topology.links, key=lambda link: link.gbps)
    copies = [replace(site, name=f"{site.name}_{index}") for site in topology.sites for index in range(factor)]
    pairs = combinations(((copy.name, copy.name.rpartition("_")[0]) for copy in copies), 2)
    links = []
    for (copy, original), (other, other_original) in pairs:
        link = topology.link(original, other_original) or near
        links.append(Link((copy, other), link.delay_ms, link.gbps))
    return Topology(tuple(copies), tuple(links))


@dataclass(frozen=True)
class Scaled:
    """The searches of one topology; `setup_seconds` is what reading the problem's numbers takes before a search."""

    kind: str
    factor: int
    gpus: int
    classes: int
    setup_seconds: float
    runs: tuple[Run, ...]
    known: Known
    before: Known | None

    @property
    def evaluation_seconds(self) -> float:
        """Return what one evaluation costs."""
        return sum(run.wall_seconds for run in self.runs) / sum(run.evaluations for run in self.runs)

    @property
    def gap(self) -> float:
        """Return by what share the plans at the end are longer than the best known, in the median."""
        return median(run.best for run in self.runs) / self.known.iteration_seconds - 1

    @property
    def near(self) -> float:
        """Return when a search came near enough to the best known, in the median; infinite where most never did."""
        return median(run.reached(self.known.iteration_seconds * (1 + GOAL_GAP)) for run in self.runs)


def grown(kind: str, factor: int, knobs: Knobs) -> Problem:
    """Return the problem with so many times the GPUs; the job stays the paper's."""
    asked = problem(Case(*CASE, knobs.setting), knobs)
    grow = more_nodes if kind == NODES else more_sites
    return replace(asked, topology=grow(asked.topology, factor))


def run_scaled(kind: str, factor: int, knobs: Knobs, seconds: float, seeds: int) -> Scaled:
    """Search one topology with every seed."""
    name, asked = f"{' '.join(CASE)}, {kind} x {factor}", grown(kind, factor, knobs)
    began = time.monotonic()
    space = Space(asked)
    Evaluator(space)
    setup = time.monotonic() - began
    runs = tuple(run_search("sha-ea", asked, seconds, seed) for seed in range(seeds))
    before = best_known(name, asked)
    known = best_of(before, runs, command())
    if known is None:
        sys.exit(f"{name}: no plan found in {seconds:g} s; give it more with --seconds")
    found = Scaled(kind, factor, sum(space.sizes), len(space.classes), setup, runs, known, before)
    print(f"{name}: {found.evaluation_seconds * 1e6:.1f} us, gap {found.gap:.1%}", file=sys.stderr, flush=True)
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def exponents(scaled: list[Scaled]) -> dict[str, float]:
    """Return the power of the GPUs with which the cost of an evaluation grows, from the smallest to the largest."""
    found = {}
    for kind in (NODES, SITES):
        first, *_, last = _grown_by(kind, scaled)
        found[kind] = log(last.evaluation_seconds / first.evaluation_seconds) / log(last.gpus / first.gpus)
    return found


def _grown_by(kind: str, scaled: list[Scaled]) -> list[Scaled]:
    return [one for one in scaled if one.kind == kind or one.factor == 1]


def page(scaled: list[Scaled]) -> str:
    """Return the benchmark's part of the page."""
    powers = exponents(scaled)
    goals = [one for one in scaled if one.gpus == GOAL_GPUS]
    reached = sum(one.gap <= GOAL_GAP for one in goals)
    longest = max(run.wall_seconds for one in scaled for run in one.runs)
    lines = [
        f"sha-ea on one core ({', '.join(CASE)}) on ever more GPUs: every node several times at its site, or every "
        "site several times with links like those of the originals. The gap is to the best plan known, predicted by "
        f"our model. With {GOAL_GPUS:,} GPUs {reached} of {len(goals)} plans are within {GOAL_GAP:.0%} of it after at "
        f"most {longest:.0f} s (to reach: all, 60 s). The cost of an evaluation grows with the GPUs to the power of "
        + " and ".join(f"{power:.2f} ({kind})" for kind, power in powers.items())
        + ". Set-up: reading the problem's numbers from the cost model, before a search starts.",
        "",
        "| more | GPUs | classes | set-up | plans per second | per plan | iteration | gap | within "
        f"{GOAL_GAP:.0%} after |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in scaled:
        near = "-" if one.near == inf else f"{one.near:.1f} s"
        lines.append(
            f"| {one.kind} | {one.gpus:,} | {one.classes} | {one.setup_seconds:.1f} s "
            f"| {1 / one.evaluation_seconds:,.0f} | {one.evaluation_seconds * 1e6:.1f} µs "
            f"| {median(run.best for run in one.runs):.2f} s | {one.gap:.1%} | {near} |"
        )
    return "\n".join([*lines, "", f"![Cost of an evaluation against GPUs](images/{PICTURE.name})"])


def picture(scaled: list[Scaled]) -> str:
    """Return the plot: microseconds per evaluation against GPUs."""
    lines = []
    for kind, colour in COLOURS.items():
        own = [(float(one.gpus), one.evaluation_seconds * 1e6) for one in _grown_by(kind, scaled)]
        lines.append(Line(f"more {kind}", colour, own))
    marks = sorted({float(one.gpus) for one in scaled})
    return plot("Microseconds per evaluation of a whole plan", "GPUs", lines, marks)


# --- the run ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run all, write the result and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--full", action="store_true", help="60 s and 3 seeds, more sites up to 4,096 (also: FULL=1)")
    parser.add_argument("--best-known", action="store_true", help="600 s, 3 seeds, keep what beats the best known")
    parser.add_argument("--seconds", type=float, help="of every search")
    parser.add_argument("--seeds", type=int, help="of every topology")
    if os.environ.get("FULL") == "1" and not {"--full", "--best-known"} & set(sys.argv):
        sys.argv.append("--full")  # so that the result names the whole command
    arguments, knobs = parser.parse_args(), read_yaml(ROOT / "benchmarks" / "paper.yaml", Knobs)
    long = arguments.full or arguments.best_known
    seconds = arguments.seconds or (600.0 if arguments.best_known else 60.0 if long else 20.0)
    seeds = arguments.seeds or (3 if long else 1)
    use_one_core()
    warm_up(grown(NODES, 1, knobs))
    scaled = [run_scaled(kind, factor, knobs, seconds, seeds) for kind, factor in (LONG if long else SHORT)]
    for one in scaled:
        if arguments.best_known and one.known is not one.before:
            keep(f"{' '.join(CASE)}, {one.kind} x {one.factor}", one.known)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(scaled))
    table = page(scaled)
    kept = [
        {
            "more": one.kind,
            "gpus": one.gpus,
            "classes": one.classes,
            "setup_seconds": one.setup_seconds,
            "microseconds_per_evaluation": one.evaluation_seconds * 1e6,
            **finite({"gap": one.gap, "seconds_to_near": one.near}),
            "best_known": asdict(one.known),
            "runs": [record(run) for run in one.runs],
        }
        for one in scaled
    ]
    write_result("scale", {"seconds": seconds, "growth": exponents(scaled), "topologies": kept}, table)
    print(table)


if __name__ == "__main__":
    main()
