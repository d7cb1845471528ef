"""Weight sync over a shaped link: how long a full set takes from a trainer to replicas at two other sites.

share = bytes of the set per second, over the rate of one link (each link carries the set once)
seconds = from the first byte to the word of both replicas that every digest is right and the file is there
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _lab_sites import SITES, Shape, lab_sites, order, reply_of
from _results import ROOT, write_result

SHAPES = (Shape(1.0, 25.0, 0.0), Shape(0.4, 10.0, 0.0))
SIZES_MB = (64, 256)
SHARE = 0.90  # to reach, at the first shape
REPEATS = 3
WARM_UP_MB = 64


def measure() -> list[dict[str, Any]]:
    """Publish sets of each size over each shape."""
    script = str(ROOT / "benchmarks" / "_sync_member.py")
    trainer, *replicas = (f"{site}/{'actor_generation' if i else 'actor_training'}/0" for i, site in enumerate(SITES))
    rows = []
    with tempfile.TemporaryDirectory() as work, lab_sites(Path(work)) as sites:
        for site, replica in zip(SITES[1:], replicas, strict=True):
            sites.start(site, [sys.executable, script, replica, sites.endpoints[site]])
        publishing = sites.start(SITES[0], [sys.executable, script, trainer, sites.endpoints[SITES[0]], *replicas])
        for shape in SHAPES:
            sites.shape(shape)
            order(publishing, WARM_UP_MB * 10**6)
            reply_of(publishing)
            for size_mb in SIZES_MB:
                taken = []
                for _ in range(REPEATS):
                    order(publishing, size_mb * 10**6)
                    taken.append(reply_of(publishing)[1])
                seconds = statistics.median(taken)
                rows.append(
                    {
                        "gbps": shape.gbps,
                        "delay_ms": shape.delay_ms,
                        "size_mb": size_mb,
                        "seconds": seconds,
                        "share": size_mb * 8e-3 / shape.gbps / seconds,
                        "load": os.getloadavg()[0],
                    }
                )
                print(f"{shape}: {size_mb} MB in {seconds:.2f} s, {rows[-1]['share']:.0%} of the link", flush=True)
    return rows


def main() -> None:
    """Run all, write the result."""
    load = os.getloadavg()[0]  # what else the machine had to do
    rows = measure()
    reached = all(row["share"] >= SHARE for row in rows if row["gbps"] == SHAPES[0].gbps)
    lines = [
        "A full set of weights (bf16) from a trainer to one replica at each of two other sites, until both have it "
        f"whole and checked; vLLM's loading is left out. Median of {REPEATS}. Share: bytes of the set per second over "
        f"the rate of one link. To reach at 1 Gbps and 25 ms one way: {SHARE:.0%}; "
        f"{'reached' if reached else 'not reached'}. TCP itself gets 94 %. All processes and the shaper of the links "
        f"share this machine's cores, which had a load of {load:.1f} besides. The shaper carries 1.9 Gb/s over all "
        "links where it has a core to itself: two links of 1 Gbps measure the machine. Load: of the machine just after "
        "each, this benchmark included. What plain TCP carries: benchmark `tcp`.",
        "",
        "| link | set | seconds | share | load |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        link = f"{row['gbps']:g} Gbps, {row['delay_ms']:g} ms"
        lines.append(
            f"| {link} | {row['size_mb']} MB | {row['seconds']:.2f} | {row['share']:.0%} | {row['load']:.1f} |"
        )
    write_result("sync", {"seed": 1, "load_before": load, "rows": rows, "reached": reached}, "\n".join(lines))


if __name__ == "__main__":
    main()
