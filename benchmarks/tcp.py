"""What plain TCP carries over the links of `group` and `sync`: the ceiling of everything that is built on it.

streams as a link between gateways has them, bytes from memory to memory, no encryption, no processes between; plain, as
        the kernel sends by itself, and paced, as gateways do
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
KINDS = ("plain", "paced")
_PORT = 7600


class Streams:
    """The streams between two sites, of one kind."""

    def __init__(self, sites: LabSites, kind: str, port: int) -> None:
        script = str(ROOT / "benchmarks" / "_tcp_end.py")
        where = [sites.address(SITES[0]), str(port), str(STREAMS), kind]
        self._ends = [
            sites.start(site, [sys.executable, script, role, *where])
            for site, role in zip(SITES, ("listen", "connect"), strict=False)
        ]
        assert [*map(reply_of, self._ends)] == ["ready"] * 2

    def seconds(self, size_mb: int, both: bool) -> float:
        """Return how long so much takes, in one direction or in both at once."""
        for end in self._ends:
            order(end, [size_mb * 10**6, both])
        return float(max(reply_of(end) for end in self._ends))


def measure(sites: LabSites) -> list[dict[str, Any]]:
    """Time each shape, in one direction and in both, by streams of each kind in turn."""
    streams = {kind: Streams(sites, kind, _PORT + number) for number, kind in enumerate(KINDS)}
    rows = []
    for shape, both in product(SHAPES, (False, True)):
        sites.shape(shape)
        for one in streams.values():
            one.seconds(WARM_UP_MB, both)
        turns = [{kind: one.seconds(SIZE_MB, both) for kind, one in streams.items()} for _ in range(REPEATS)]
        seconds = {kind: statistics.median(turn[kind] for turn in turns) for kind in KINDS}
        shares = {kind: SIZE_MB * 8e-3 / shape.gbps / took for kind, took in seconds.items()}
        rows.append({**vars(shape), "both": both, "seconds": seconds, "share": shares, "load": os.getloadavg()[0]})
        print(f"{shape}, {'both ways' if both else 'one way'}: {seconds} s, {shares} of the link", flush=True)
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """Return the benchmark's part of the page."""
    lines = [
        f"{SIZE_MB} MB over {STREAMS} TCP streams (cubic) between two sites, in one direction and in both at once; no "
        f"encryption, no gateways, median of {REPEATS}. Paced: as gateways send (docs/transport.md), the two kinds in "
        "turn. Load: of the machine just after, this benchmark included.",
        "",
        "| link | directions | plain s | share | paced s | share | load |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        figures = " | ".join(f"{row['seconds'][kind]:.2f} | {row['share'][kind]:.0%}" for kind in KINDS)
        lines.append(
            f"| {row['gbps']:g} Gbps, {row['delay_ms']:g} ms | {'both' if row['both'] else 'one'} "
            f"| {figures} | {row['load']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all, write the result."""
    with tempfile.TemporaryDirectory() as work, lab_sites(Path(work)) as sites:
        rows = measure(sites)
    write_result("tcp", {"seed": None, "rows": rows}, page(rows))


if __name__ == "__main__":
    main()
