"""Weight sync over shaped links: full sets and deltas from a trainer to a replica at one other site, or two.

`--tiny` tries it on small models in a minute and writes nothing.

share = bytes of the set per second, over the rate of one link (each link carries the set once)
seconds = from the first byte to the word of all replicas that every digest is right and the file is there
cores busy = processor seconds of trainer, replicas, gateways and shaper per second
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from _cpu import cpu_of_all
from _results import ROOT, write_result
from _sync_deltas import SHAPE, Setting, delta_lines, measure_deltas, reached as deltas_reached

from lab.worlds.gateways import SITES, Shape, lab_sites, order, reply_of

FAST = Shape(1.0, 25.0, 0.0)  # as far as this machine's cores carry
SHAPES = (FAST, Shape(0.4, 10.0, 0.0), Shape(0.1, 40.0, 0.0))
RECEIVERS = (1, 2)
SIZES_MB = (64, 256)
SHARE = 0.90  # to reach, at the other shapes
REPEATS = 3
WARM_UP_MB = 64


def measure(setting: Setting, sizes_mb: Sequence[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Publish sets of each size over each shape, then the deltas."""
    script = str(ROOT / "benchmarks" / "_sync_member.py")
    trainer, *replicas = (f"{site}/{'actor_generation' if i else 'actor_training'}/0" for i, site in enumerate(SITES))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work, lab_sites(Path(work)) as sites:
        taking = [
            sites.start(site, [sys.executable, script, replica, sites.endpoints[site]])
            for site, replica in zip(SITES[1:], replicas, strict=True)
        ]
        publishing = sites.start(SITES[0], [sys.executable, script, trainer, sites.endpoints[SITES[0]], *replicas])
        members = [process.pid for process in (publishing, *taking)]
        around = {"members": members, "gateways": [one.pid for one in sites.gateways], "shaper": [sites.shaper_pid]}

        def ordered(source: str | int, receivers: int, delta: bool) -> tuple[dict[str, Any], dict[str, float]]:
            before = cpu_of_all(around)
            order(publishing, [source, receivers, delta])
            published = reply_of(publishing)
            return published, {name: (cpu - before[name]).seconds for name, cpu in cpu_of_all(around).items()}

        def publish(size_mb: int, receivers: int) -> tuple[float, dict[str, float]]:
            published, cpu_seconds = ordered(size_mb * 10**6, receivers, False)
            return published["seconds"], cpu_seconds

        for shape, receivers in product(SHAPES, RECEIVERS):
            sites.shape(shape)
            publish(WARM_UP_MB, receivers)
            for size_mb in sizes_mb:
                taken = sorted((publish(size_mb, receivers) for _ in range(REPEATS)), key=lambda one: one[0])
                seconds, cpu_seconds = taken[REPEATS // 2]
                where = {"gbps": shape.gbps, "delay_ms": shape.delay_ms, "receivers": receivers, "size_mb": size_mb}
                share = size_mb * 8e-3 / shape.gbps / seconds
                measured = {"seconds": seconds, "share": share, "cpu_seconds": cpu_seconds, "load": os.getloadavg()[0]}
                rows.append({**where, **measured})
                print(f"{shape}, {receivers} sites: {size_mb} MB, {share:.0%} of the link", file=sys.stderr, flush=True)
        sites.shape(SHAPE)
        return rows, measure_deltas(ordered, RECEIVERS[-1], setting)


def main() -> None:
    """Run all, write the result."""
    load = os.getloadavg()[0]  # what else the machine had to do
    if "--tiny" in sys.argv:
        _, deltas = measure(Setting(("tiny",), (1e-3,), 1), (16,))
        print("\n".join(delta_lines(deltas)))
        return
    rows, deltas = measure(Setting(), SIZES_MB)
    wanted = [row["share"] >= SHARE for row in rows if row["gbps"] < FAST.gbps]
    lines = [
        "A full set of weights (bf16) from a trainer to a replica at one other site, or one at each of two, until all "
        f"have it whole and checked; vLLM's loading is left out. Median of {REPEATS}. Share: bytes of the set per "
        f"second over the rate of one link. To reach: {SHARE:.0%} below {FAST.gbps:g} Gbps, which {sum(wanted)} of "
        f"{len(wanted)} have. TCP itself gets 94 %, once its windows are open: benchmark `tcp` "
        "has what plain TCP carries. All processes and the shaper of the links share this machine's "
        f"{os.cpu_count()} cores, which had a load of {load:.1f} besides: where nearly all are busy, the figure is "
        f"that of the machine, as at {FAST.gbps:g} Gbps. The processor seconds are those per GB of the set; the "
        "trainer's include making it.",
        "",
        "| link | sites | set | seconds | share | trainer and replicas | gateways | shaper | cores busy |",
        "| --- " * 9 + "|",
    ]
    for row in rows:
        cpu = row["cpu_seconds"]
        per_gb = " | ".join(f"{cpu[name] / row['size_mb'] * 1e3:.1f}" for name in ("members", "gateways", "shaper"))
        lines.append(
            f"| {row['gbps']:g} Gbps, {row['delay_ms']:g} ms | {row['receivers']} | {row['size_mb']} MB "
            f"| {row['seconds']:.2f} | {row['share']:.0%} | {per_gb} | {sum(cpu.values()) / row['seconds']:.1f} |"
        )
    lines += ["", *delta_lines(deltas)]
    result = {"rows": rows, "reached": all(wanted), "deltas": deltas, "deltas_reached": deltas_reached(deltas)}
    write_result("sync", {"seed": 1, "load_before": load, **result}, "\n".join(lines))


if __name__ == "__main__":
    main()
