"""Broadcast and all-reduce across sites over shaped links: the backend `wan` against gloo, in one run.

sites of the lab, one rank each; gloo's ranks reach each other directly, wan's go over the gateways
for each shape of the links, number of sites, operation and size: both backends in turn
share = bytes of the tensor per second, over the rate of one link in one direction: `wan` sends them over the busiest
        link once in either operation (all-reduce of s sites: (s - 1) / s as sums, 1 / s as totals)
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from _lab_sites import INTERFACE, SITES, LabSites, Shape, lab_sites, order, reply_of
from _results import ROOT, write_result

SHAPES = ((1.0, 25.0), (0.4, 10.0), (0.1, 40.0))
LOSSES = (0.0, 1e-4)
OPERATIONS = ("broadcast", "all_reduce")
SIZES_MB = (64, 256)
SHARE, RATIO, LEAST = 0.90, 2.0, 0.95  # to reach: share of the link; over gloo where it is limited; over gloo ever
REPEATS = 3  # the median counts
SLOW_SECONDS = 2.0  # what takes longer is done once
WARM_UP_MB = 16
FULL = os.environ.get("FULL") == "1"
_STORE_PORT = 7500


class World:
    """The ranks of one backend, one per site."""

    def __init__(self, sites: LabSites, backend: str) -> None:
        ranks = [f"{site}/trainer/0" for site in SITES]
        setup = {"backend": backend, "ranks": ranks, "gateways": sites.endpoints}
        setup["store"] = [sites.address(SITES[0]), _STORE_PORT]
        command = [sys.executable, str(ROOT / "benchmarks" / "_group_rank.py"), json.dumps(setup)]
        self._ranks = [
            sites.start(site, [*command, str(rank)], GLOO_SOCKET_IFNAME=INTERFACE) for rank, site in enumerate(SITES)
        ]
        for process in self._ranks:
            assert reply_of(process) == "ready"

    def seconds(self, sites: int, operation: str, size_mb: int) -> float:
        """Return how long the slowest rank of an operation took."""
        taking: list[subprocess.Popen[str]] = self._ranks[:sites]
        for process in taking:
            order(process, [sites, operation, size_mb * 10**6])
        return max(reply_of(process) for process in taking)

    def typical_seconds(self, sites: int, operation: str, size_mb: int) -> float:
        """Return the median of some repetitions, of one where it is slow."""
        self.seconds(sites, operation, WARM_UP_MB)
        found = [self.seconds(sites, operation, size_mb)]
        while len(found) < REPEATS and found[0] < SLOW_SECONDS:
            found.append(self.seconds(sites, operation, size_mb))
        return statistics.median(found)


def cases() -> list[tuple[Shape, int, str, int]]:
    """Return what is measured: all sizes in a full run, else the smallest."""
    every = product(product(SHAPES, LOSSES), (2, 3), OPERATIONS, SIZES_MB if FULL else SIZES_MB[:1])
    return [(Shape(*shape, loss), sites, operation, size_mb) for (shape, loss), sites, operation, size_mb in every]


def measure() -> list[dict[str, Any]]:
    """Run every case."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work, lab_sites(Path(work)) as sites:
        worlds = {backend: World(sites, backend) for backend in ("wan", "gloo")}
        for shape, count, operation, size_mb in cases():
            sites.shape(shape)
            seconds = {name: world.typical_seconds(count, operation, size_mb) for name, world in worlds.items()}
            rate = size_mb * 8e-3 / shape.gbps
            row = {
                "gbps": shape.gbps,
                "delay_ms": shape.delay_ms,
                "loss": shape.loss,
                "sites": count,
                "operation": operation,
                "size_mb": size_mb,
                **{f"{name}_seconds": took for name, took in seconds.items()},
                **{f"{name}_share": rate / took for name, took in seconds.items()},
                "over_gloo": seconds["gloo"] / seconds["wan"],
            }
            rows.append(row)
            print(
                f"{shape}: {operation} {size_mb} MB, {count} sites: wan {seconds['wan']:.2f} s, "
                f"{row['wan_share']:.0%} of the link, {row['over_gloo']:.2f} x gloo",
                flush=True,
            )
    return rows


def page(rows: Sequence[Mapping[str, Any]], load: float) -> str:
    """Return the benchmark's part of the page; `load` is what the machine had to do besides (load average)."""
    full = [row for row in rows if row["wan_share"] >= SHARE]
    limited = [row for row in rows if row["gloo_share"] < SHARE / RATIO]
    twice = [row for row in limited if row["over_gloo"] >= RATIO]
    lines = [
        "Broadcast and all-reduce of fp32 across sites of one rank, over shaped links: `wan` against gloo, whose ranks "
        f"reach each other directly (median of {REPEATS}, one where it takes longer than {SLOW_SECONDS:g} s). Share: "
        "bytes of the tensor, which `wan` sends over the busiest link once in either operation, per second over the "
        f"rate of a link in one direction; TCP gets 94 % of that. `wan` has {SHARE:.0%} of the link or more in "
        f"{len(full)} of {len(rows)} cases (to "
        f"reach: all), is at least {RATIO:g} times as fast as gloo in {len(twice)} of the {len(limited)} cases in "
        f"which gloo has less than {SHARE / RATIO:.0%} (to reach: all), and at least "
        f"{min(row['over_gloo'] for row in rows):.2f} times as fast everywhere (to reach: {LEAST:g}). The ranks and "
        f"gateways of all sites share this machine's cores, which had a load of {load:.1f} besides; the shaper "
        "carries 1.9 Gb/s over all links where it has a core to itself: at 1 Gbps, what crosses more than one link or "
        "direction may be limited by either.",
        "",
        "| link | loss | sites | operation | MB | wan s | gloo s | wan share | gloo share | over gloo |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['gbps']:g} Gbps, {row['delay_ms']:g} ms | {row['loss']:.2%} | {row['sites']} | {row['operation']} "
            f"| {row['size_mb']} | {row['wan_seconds']:.2f} | {row['gloo_seconds']:.2f} | {row['wan_share']:.0%} "
            f"| {row['gloo_share']:.0%} | {row['over_gloo']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all, write the result."""
    load = os.getloadavg()[0]  # what else the machine had to do
    rows = measure()
    write_result("group", {"seed": None, "full": FULL, "load_before": load, "rows": rows}, page(rows, load))


if __name__ == "__main__":
    main()
