"""What plain TCP carries over the links of `group` and `sync`: the ceiling of everything that is built on it.

streams as a link between gateways has them, bytes from memory to memory, no encryption, no processes between
share = payload per second, over the rate of the link in one direction; both directions at once, as in an all-reduce of
        two sites, or one, as in a broadcast
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from _results import ROOT, write_result

from lab.worlds.gateways import SITES, LabSites, Shape, lab_sites, order, reply_of
from launch.site_ways import STREAMS

SHAPES = (Shape(1.0, 25.0, 0.0), Shape(0.4, 10.0, 0.0), Shape(0.1, 40.0, 0.0))
SIZE_MB, WARM_UP_MB = 64, 16
REPEATS = 3  # the median counts
_PORT = 7600


def measure(sites: LabSites) -> list[dict[str, Any]]:
    """Time each shape, in one direction and in both."""
    script = str(ROOT / "benchmarks" / "_tcp_end.py")
    where = [sites.address(SITES[0]), str(_PORT), str(STREAMS)]
    ends = [
        sites.start(site, [sys.executable, script, role, *where])
        for site, role in zip(SITES, ("listen", "connect"), strict=False)
    ]
    for end in ends:
        assert reply_of(end) == "ready"

    def seconds(size_mb: int, both: bool) -> float:
        for end in ends:
            order(end, [size_mb * 10**6, both])
        return float(max(reply_of(end) for end in ends))

    rows = []
    for shape, both in product(SHAPES, (False, True)):
        sites.shape(shape)
        seconds(WARM_UP_MB, both)
        took = statistics.median(seconds(SIZE_MB, both) for _ in range(REPEATS))
        share = SIZE_MB * 8e-3 / shape.gbps / took
        rows.append({**vars(shape), "both": both, "seconds": took, "share": share, "load": os.getloadavg()[0]})
        print(f"{shape}, {'both ways' if both else 'one way'}: {took:.2f} s, {share:.0%} of the link", flush=True)
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """Return the benchmark's part of the page."""
    lines = [
        f"{SIZE_MB} MB over {STREAMS} plain TCP streams (cubic) between two sites, in one direction and in both at "
        f"once; no encryption, no gateways, median of {REPEATS}. Load: of the machine just after, this benchmark "
        "included.",
        "",
        "| link | directions | seconds | share | load |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['gbps']:g} Gbps, {row['delay_ms']:g} ms | {'both' if row['both'] else 'one'} "
            f"| {row['seconds']:.2f} | {row['share']:.0%} | {row['load']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all, write the result."""
    with tempfile.TemporaryDirectory() as work, lab_sites(Path(work)) as sites:
        rows = measure(sites)
    write_result("tcp", {"seed": None, "rows": rows}, page(rows))


if __name__ == "__main__":
    main()
