"""One training over two and three sites: bytes and seconds of an optimiser step, beside what the cost model says.

sites of the lab, a rank each (`_across_rank`); compute is a sleep, what crosses is that of a model RATIO times smaller
than 8B, and a step's compute is 300 s / RATIO: bytes per second of compute are those of 8B. Delays are those of the
links, so that they weigh RATIO times as much; then once more RATIO times shorter, to scale, which is how 8B meets them.
for each shape of the links: measure what a link gives in both directions at once, as all layouts use it; then for each
layout take some steps
predicted = pipeline and reduction of `hetrl.cost` with the measured rate
share = the same step inside one site, as predicted / measured
dilated (`_time_dilation`): compute takes as many times longer as the links

    python benchmarks/across.py                                     # all that the result has not; writes it
    python benchmarks/across.py --fresh                             # all
    python benchmarks/across.py --gbps 1 --layout "data, 2 sites"   # some; prints its part of the page only
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _across_rank import Step
from _results import RESULTS, ROOT, write_result
from _steps_across import (
    CASES,
    CHANGED,
    LAYOUTS,
    MICRO_BATCHES,
    PARAMETERS,
    RANKS,
    RATIO,
    SHAPES,
    STEP_SECONDS,
    TOKENS,
    Case,
    Layout,
    predicted_seconds,
    step_of,
)
from _time_dilation import EXPLAINED, Dilated

from hetrl.runtime import wire
from lab.worlds.gateways import LabSites, open_lab, order, reply_of

STEPS = 4  # the first one gathers all values, and is not counted
PROBE_MB = 64
# of what a kept row must be
SETTINGS = {
    "parameters": PARAMETERS,
    "step_seconds": STEP_SECONDS,
    "tokens": TOKENS,
    "micro_batches": MICRO_BATCHES,
    "changed": CHANGED,
    "steps": STEPS,
    "probe_mb": PROBE_MB,
}
BYTES_GOAL, SHARE_GOAL, PREDICTED_GOAL = 0.55, 0.85, 0.10

Row = dict[str, Any]  # of the result


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


def measure(cases: Sequence[Case]) -> Iterator[Row]:
    """Take the steps of every layout in every case, and yield what they were."""
    for case in cases:
        if not case.layouts:
            continue
        with tempfile.TemporaryDirectory() as work, open_lab() as (lab, stack):
            sites = LabSites(lab, Path(work), stack, members=RANKS)
            sites.shape(case.links.link)
            world = World(sites)
            gbps = world.link_gbps(PROBE_MB)
            for layout in case.layouts:
                row = measured(world, layout, case.links, gbps)
                print(row, file=sys.stderr, flush=True)
                yield row


def measured(world: World, layout: Layout, links: Dilated, link_gbps: float) -> Row:
    """Measure one layout; bytes are of the busiest direction, in multiples of the gradient's of one stage."""
    places = {rank: (r, s) for r, ranks in enumerate(layout.replicas) for s, rank in enumerate(ranks)}
    asked = [step_of(layout, *places[rank], links.times) for rank in sorted(places)]
    step = asked[layout.replicas[0][0]]
    seconds, sent = world.steps(asked)
    gradient = 2 * step.parameters
    data = len(layout.replicas) > 1
    busiest = max(sent.values())
    predicted, near = predicted_seconds(layout, step, links.link, link_gbps)
    took = statistics.median(seconds)
    return {
        **asdict(links.shape),
        "link": str(links),
        "dilation": links.times,
        "delay_share": links.delay_share,
        "layout": layout.name,
        "ratio": RATIO,
        "measured_gbps": link_gbps * links.times,
        "gradient_mb": gradient / 1e6 if data else None,
        "busiest_mb": busiest / 1e6,
        "per_gradient": busiest / gradient if data and layout.stages == 1 else None,
        "seconds": took / links.times,
        "predicted_seconds": predicted / links.times,
        "one_site_seconds": near / links.times,
        "share": near / took,
        "sent_bytes": sent,
        "load_before": os.getloadavg()[0],
    }


def off(row: Row) -> float:
    """Return the share of the measured seconds by which the predicted ones differ."""
    return abs(float(row["predicted_seconds"]) / float(row["seconds"]) - 1)


def reached(rows: Sequence[Row]) -> str:
    """Return how many rows are predicted well."""
    return f"{sum(off(row) <= PREDICTED_GOAL for row in rows)} of {len(rows)} cases"


def page(rows: Sequence[Row]) -> str:
    """Return the benchmark's part of the page."""
    data = [row for row in rows if row["layout"] == LAYOUTS[0].name]
    shares = [f"{row['share']:.0%} ({row['link']})" for row in data if row["gbps"] == SHAPES[0].gbps]
    scaled = [row for row in rows if row["delay_share"] < 1]
    unscaled = [row for row in rows if row not in scaled]
    share = f", {' and '.join(shares)} of one site (to reach: {SHARE_GOAL:.0%})" if shares else ""
    per_gradient = [row["per_gradient"] for row in data]
    two = f" Two sites, data: {max(per_gradient):.2f} n (to reach: {BYTES_GOAL:g} n){share}." if data else ""
    lines = [
        f"One optimiser step of a training over sites. Compute is a sleep, {STEP_SECONDS:g} s of 8B over the ratio; "
        f"what crosses has the real bytes of a model {rows[0]['ratio']:.0f} times smaller, in bf16, so that both are "
        "to each other as with 8B. Delays weigh so many times more than they would; to scale, they are so many times "
        "shorter, which is how 8B meets the links. Replicas reduce-scatter "
        f"gradients and gather parameters of which {CHANGED:.1%} change; a pipeline has {MICRO_BATCHES} micro-batches "
        f"of {TOKENS:,} tokens in all. Bytes: of the busiest direction, counted by the gateways; n: those of the "
        "gradient. Share: the same step inside one site, over the one measured. Predicted: `hetrl.cost` with the rate "
        "that transfers in both directions at once got alone, and what is left of the reduction behind the last "
        "backward pass, during which the ranks reduce buckets, as Megatron does. "
        f"{EXPLAINED}{two} "
        f"Predicted within {PREDICTED_GOAL:.0%} in {reached(unscaled)} with delays as they are, and in "
        f"{reached(scaled)} to scale, at worst {max(map(off, scaled), default=0.0):.0%} off (to reach: all).",
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


def kept() -> list[Row]:
    """Return the rows of the last result, if they are of these settings."""
    path = RESULTS / "across.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    return list(result["rows"]) if result.get("settings") == SETTINGS else []


def narrowed(is_wanted: Callable[[Dilated, Layout], bool]) -> list[Case]:
    """Return the cases with those of their layouts that are wanted."""
    return [replace(case, layouts=tuple(one for one in case.layouts if is_wanted(case.links, one))) for case in CASES]


def write_all(known: Sequence[Row]) -> None:
    """Take the steps of what is not known, and write the result after each."""
    rows = {(row["link"], row["layout"]): row for row in known}
    wanted = [(str(case.links), layout.name) for case in CASES for layout in case.layouts]
    for row in measure(narrowed(lambda links, layout: (str(links), layout.name) not in rows)):
        rows[row["link"], row["layout"]] = row
        there = [rows[one] for one in wanted if one in rows]
        write_result("across", {"seed": 0, "settings": SETTINGS, "rows": there}, page(there))


def main() -> None:
    """Run all that the result has not and write it, or run some and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--gbps", type=float, action="append", choices=[shape.gbps for shape in SHAPES])
    parser.add_argument("--dilation", type=int, action="append", choices=sorted({case.links.times for case in CASES}))
    parser.add_argument("--to-scale", action="store_true", help="only those with delays to scale")
    parser.add_argument("--layout", action="append", choices=[layout.name for layout in LAYOUTS])
    parser.add_argument("--fresh", action="store_true", help="keep nothing of the result")
    asked = parser.parse_args()
    if asked.gbps or asked.dilation or asked.to_scale or asked.layout:
        some = narrowed(
            lambda links, layout: (
                (not asked.gbps or links.shape.gbps in asked.gbps)
                and (not asked.dilation or links.times in asked.dilation)
                and (not asked.to_scale or links.delay_share < 1)
                and (not asked.layout or layout.name in asked.layout)
            )
        )
        print(page([*measure(some)]))
    else:
        write_all([] if asked.fresh else kept())


if __name__ == "__main__":
    main()
