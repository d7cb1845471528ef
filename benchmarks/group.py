"""Broadcast and all-reduce across sites over shaped links: the backend `wan` against gloo, in one run.

sites of the lab, one rank each; gloo's ranks reach each other directly, wan's go over the gateways
for each shape of the links, number of sites, operation and size: both backends in turn
dilated: `_time_dilation`
share = bytes of the tensor per second, over the rate of one link in one direction: `wan` sends them over the busiest
        link once in either operation (all-reduce of s sites: (s - 1) / s as sums, 1 / s as totals)

    python benchmarks/group.py                                             # all; writes the result
    python benchmarks/group.py --gbps 0.1 --sites 2 --operation all_reduce # some; prints its part of the page only
    python benchmarks/group.py --loss 0 --profile                          # what the processors do; a result too
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

from _cpu import Cpu, cpu_of_all
from _results import ROOT, write_result
from _time_dilation import EXPLAINED, Dilated

from lab.worlds.gateways import INTERFACE, SITES, LabSites, Shape, lab_sites, order, reply_of

SHAPES = ((1.0, 25.0, 1), (1.0, 25.0, 4), (0.4, 10.0, 1), (0.1, 40.0, 1))  # Gbps, ms, dilation (without losses)
LOSSES = (0.0, 1e-4)
OPERATIONS = ("broadcast", "all_reduce")
SMALL_MB = 1  # its time is that of round trips, not of bytes
SIZES_MB = (SMALL_MB, 64, 256)
SHARE, RATIO, LEAST = 0.90, 2.0, 0.95  # to reach: share of the link; over gloo where it is limited; over gloo ever
REPEATS, SMALL_REPEATS = 3, 9  # the median counts
SLOW_SECONDS = 8.0  # what takes longer is done once
WARM_UP_MB = 16
FULL = os.environ.get("FULL") == "1"
_STORE_PORT = 7500


@dataclass(frozen=True)
class Case:
    """One operation on a tensor over links of one shape."""

    links: Dilated
    sites: int
    operation: str
    size_mb: int


class World:
    """The ranks of one backend, one per site."""

    def __init__(self, sites: LabSites, backend: str, store_port: int = _STORE_PORT) -> None:
        ranks = [f"{site}/actor_training.rank/0" for site in SITES]
        setup: dict[str, Any] = {"backend": backend, "ranks": ranks, "gateways": sites.endpoints}
        setup["store"] = [sites.address(SITES[0]), store_port]
        command = [sys.executable, str(ROOT / "benchmarks" / "_group_rank.py"), json.dumps(setup)]
        self._ranks = [
            sites.start(site, [*command, str(rank)], GLOO_SOCKET_IFNAME=INTERFACE) for rank, site in enumerate(SITES)
        ]
        for process in self._ranks:
            assert reply_of(process) == "ready"

    def take(self, case: Case, size_mb: int) -> tuple[float, Cpu]:
        """Return how long the slowest rank of an operation took, and the processor seconds of all its ranks."""
        taking: list[subprocess.Popen[str]] = self._ranks[: case.sites]
        for process in taking:
            order(process, [case.sites, case.operation, size_mb * 10**6])
        replies = [reply_of(process) for process in taking]
        return max(seconds for seconds, *_ in replies), sum((Cpu(*used) for _, *used in replies), Cpu())

    def typical_seconds(self, case: Case) -> float:
        """Return the median of some repetitions, of one where it is slow."""
        self.take(case, WARM_UP_MB)
        repeats = SMALL_REPEATS if case.size_mb <= SMALL_MB else REPEATS
        found = [self.take(case, case.size_mb)[0]]
        while len(found) < repeats and found[0] < SLOW_SECONDS:
            found.append(self.take(case, case.size_mb)[0])
        return statistics.median(found)


@contextmanager
def both(links: Dilated) -> Iterator[tuple[LabSites, dict[str, World]]]:
    """Give both backends links of one shape and connections that have seen no other: TCP is slow to forget losses."""
    with tempfile.TemporaryDirectory() as work, lab_sites(Path(work)) as sites:
        sites.shape(links.link)
        yield sites, {backend: World(sites, backend) for backend in ("wan", "gloo")}


def by_links(cases: Sequence[Case]) -> Iterator[tuple[Dilated, list[Case]]]:
    """Yield the cases that have their links in common."""
    for links, group in groupby(cases, key=lambda case: case.links):
        yield links, list(group)


def measure(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Time every case with both backends."""
    rows: list[dict[str, Any]] = []
    for links, some in by_links(cases):
        with both(links) as (_, worlds):
            rows += [measured(case, worlds) for case in some]
    return rows


def measured(case: Case, worlds: Mapping[str, World]) -> dict[str, Any]:
    """Time one case with both backends."""
    load = os.getloadavg()[0]
    seconds = {name: world.typical_seconds(case) / case.links.times for name, world in worlds.items()}
    rate = case.size_mb * 8e-3 / case.links.shape.gbps
    row = {
        **asdict(case.links.shape),
        "link": str(case.links),
        "dilation": case.links.times,
        **{name: value for name, value in vars(case).items() if name != "links"},
        **{f"{name}_seconds": took for name, took in seconds.items()},
        **{f"{name}_share": rate / took for name, took in seconds.items()},
        "over_gloo": seconds["gloo"] / seconds["wan"],
        "load_before": load,
    }
    print(
        f"{case.links}, {case.links.shape.loss:.2%}: {case.operation} {case.size_mb} MB, {case.sites} sites: "
        f"wan {seconds['wan']:.2f} s, {row['wan_share']:.0%} of the link, {row['over_gloo']:.2f} x gloo, "
        f"load {load:.1f}",
        flush=True,
    )
    return row


def profile(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return where the processors' time goes in each case, in seconds per GB of the tensor."""
    rows = []
    for links, some in by_links(cases):
        with both(links) as (sites, worlds):
            around = {"gateways": [process.pid for process in sites.gateways], "shaper": [sites.shaper_pid]}
            for case, (backend, world) in product(some, worlds.items()):
                rows.append({"backend": backend, **profiled(case, world, around)})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def profiled(case: Case, world: World, around: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return what one case takes of the processors; `around` are the processes besides the ranks."""
    world.take(case, WARM_UP_MB)
    before, taken = cpu_of_all(around), [world.take(case, case.size_mb) for _ in range(REPEATS)]
    used = {name: cpu - before[name] for name, cpu in cpu_of_all(around).items()}
    used["ranks"] = sum((cpu for _, cpu in taken), Cpu())
    seconds, size_gb = sum(seconds for seconds, _ in taken), REPEATS * case.size_mb / 1e3
    parts = {
        "ranks": used["ranks"].own_seconds,
        "ranks, ZeroMQ": used["ranks"].zeromq_seconds,
        "gateways": used["gateways"].own_seconds,
        "gateways, ZeroMQ": used["gateways"].zeromq_seconds,
        "shaper": used["shaper"].seconds,
    }
    per_gb = {name: spent / size_gb for name, spent in {"seconds": seconds, **parts}.items()}
    where = {"link": str(case.links), "loss": case.links.shape.loss, "sites": case.sites, "operation": case.operation}
    return {**where, **per_gb, "cores busy": sum(parts.values()) / seconds}


def profile_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the profile's part of the page."""
    lines = [
        "Where the time of benchmark `group` goes: seconds and processor seconds per GB of the tensor, by process and "
        "by ZeroMQ's own threads, which encrypt, decrypt and speak TCP. All share this machine's "
        f"{os.cpu_count()} cores; the shaper is one thread, and every byte between sites passes it.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "| --- " * len(rows[0]) + "|",
    ]
    for row in rows:
        cells = (f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(rows: Sequence[Mapping[str, Any]], load: float) -> str:
    """Return the benchmark's part of the page; `load` is what the machine had to do besides (load average)."""
    large = [row for row in rows if row["size_mb"] > SMALL_MB]
    full = [row for row in large if row["wan_share"] >= SHARE]
    limited = [row for row in large if row["gloo_share"] < SHARE / RATIO]
    twice = [row for row in limited if row["over_gloo"] >= RATIO]
    least = min(row["over_gloo"] for row in rows)
    lines = [
        "Broadcast and all-reduce of fp32 across sites of one rank, over shaped links: `wan` against gloo, whose ranks "
        f"reach each other directly (median of {REPEATS}, of {SMALL_REPEATS} for {SMALL_MB} MB, one where it takes "
        f"longer than {SLOW_SECONDS:g} s; fresh connections for each shape of the links). Share: "
        "bytes of the tensor, which `wan` sends over the busiest link once in either operation, per second over the "
        "rate of a link in one direction; plain TCP gets less than that, least in both directions at once (benchmark "
        f"`tcp`). `wan` has {SHARE:.0%} of the link or more in {len(full)} of the {len(large)} cases of more than "
        f"{SMALL_MB} MB (to reach: all), is at "
        f"least {RATIO:g} times as fast as gloo in {len(twice)} of the {len(limited)} cases in which gloo has less "
        f"than {SHARE / RATIO:.0%} of them (to reach: all), and at least {least:.2f} times as fast everywhere (to "
        f"reach: {LEAST:g}). Ranks, gateways and the shaper of the links share this machine's cores, which had a load "
        f"of {load:.1f} besides; load: before each case. gloo has no gateways and does not encrypt. The shaper carries "
        "1.9 Gb/s over all links where it has a core to itself: at 1 Gbps it may limit what crosses more than one, or "
        f"one in both directions. {EXPLAINED} What each process needs: `group-profile` below, docs/transport.md.",
        "",
        "| link | loss | sites | operation | MB | wan s | gloo s | wan share | gloo share | over gloo | load |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['link']} | {row['loss']:.2%} | {row['sites']} | {row['operation']} "
            f"| {row['size_mb']} | {row['wan_seconds']:.2f} | {row['gloo_seconds']:.2f} | {row['wan_share']:.0%} "
            f"| {row['gloo_share']:.0%} | {row['over_gloo']:.2f} | {row['load_before']:.1f} |"
        )
    return "\n".join(lines)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the arguments leave: all sizes in a full run, else all but the largest."""
    sizes_mb = arguments.size_mb or (SIZES_MB if FULL else SIZES_MB[:-1])
    every = product(product(SHAPES, LOSSES), (2, 3), OPERATIONS, sizes_mb)
    cases = [
        Case(Dilated(Shape(gbps, delay_ms, loss), times), sites, operation, size_mb)
        for ((gbps, delay_ms, times), loss), sites, operation, size_mb in every
        if not loss or times == 1
    ]
    wanted = {name: getattr(arguments, name) for name in ("gbps", "loss", "sites", "operation")}

    def is_wanted(case: Case) -> bool:
        known = {**vars(case), **vars(case.links.shape)}
        return all(not values or known[name] in values for name, values in wanted.items())

    return [*filter(is_wanted, cases)]


def main() -> None:
    """Run all and write the result, or run some and print."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--gbps", type=float, action="append", choices=sorted({gbps for gbps, *_ in SHAPES}))
    parser.add_argument("--loss", type=float, action="append", choices=LOSSES)
    parser.add_argument("--sites", type=int, action="append", choices=(2, 3))
    parser.add_argument("--operation", action="append", choices=OPERATIONS)
    parser.add_argument("--size-mb", type=int, action="append", help="of the tensor; any number")
    parser.add_argument("--profile", action="store_true", help="write what the processors do instead")
    arguments = parser.parse_args()
    cases, load = chosen(arguments), os.getloadavg()[0]  # what else the machine had to do
    if arguments.profile:
        rows = profile([case for case in cases if case.size_mb > SMALL_MB])
        write_result("group-profile", {"seed": None, "rows": rows}, profile_page(rows))
        return
    rows = measure(cases)
    if cases == chosen(parser.parse_args([])):
        write_result("group", {"seed": None, "full": FULL, "load_before": load, "rows": rows}, page(rows, load))
    else:
        print(page(rows, load))


if __name__ == "__main__":
    main()
