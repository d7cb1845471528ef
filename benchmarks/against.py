"""What crosses links, before and after: weight sync and collectives of this code against those of a commit, in one run.

One lab, and on its nodes the gateways and members of both codes; each operation in turn by one and by the other.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _results import ROOT, write_result
from _time_dilation import Dilated
from group import Case, World

from lab.worlds.gateways import SITES, LabSites, Shape, open_lab, order, reply_of

BEFORE = "0d33c67"  # members and gateways took whatever came with the key of a site of the run
SHAPE = Shape(0.4, 10.0, 0.0)
SIZE_MB, PAIRS, WARM_UP = 64, 15, 2
SIDES = ("before", "after")


class Side:
    """All processes of one code; `operations` return the seconds that they took."""

    def __init__(self, sites: LabSites, store_port: int) -> None:
        script = str(ROOT / "benchmarks" / "_sync_member.py")
        trainer, *replicas = (f"{site}/actor_{'generation' if i else 'training'}/0" for i, site in enumerate(SITES))
        for site, replica in zip(SITES[1:], replicas, strict=True):
            sites.start(site, [sys.executable, script, replica, sites.endpoints[site]])
        self._trainer = sites.start(SITES[0], [sys.executable, script, trainer, sites.endpoints[SITES[0]], *replicas])
        self._world = World(sites, "wan", store_port)
        self.operations: dict[str, Callable[[], float]] = {
            "weights to two sites": self._publish,
            "broadcast": lambda: self._collect("broadcast"),
            "all_reduce": lambda: self._collect("all_reduce"),
        }

    def _publish(self) -> float:
        order(self._trainer, [SIZE_MB * 10**6, len(SITES) - 1])
        return float(reply_of(self._trainer)[1])

    def _collect(self, operation: str) -> float:
        return self._world.take(Case(Dilated(SHAPE), len(SITES), operation, SIZE_MB), SIZE_MB)[0]


def code_of(commit: str, folder: Path) -> Path:
    """Unpack the files of a commit into a folder and return it."""
    packed = subprocess.run(["git", "archive", commit, "hetrl"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def measure(commit: str, pairs: int) -> list[dict[str, Any]]:
    """Take each operation in turn, and see how much longer it takes after than before."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work, open_lab() as (lab, stack):
        codes = {"before": code_of(commit, Path(work) / "code"), "after": ROOT}
        sides = {
            name: Side(LabSites(lab, Path(work) / name, stack, codes[name], 7400 + 10 * i), 7500 + i)
            for i, name in enumerate(SIDES)
        }
        for a, b in zip(SITES, (*SITES[1:], SITES[0]), strict=True):
            lab.link(a, b, SHAPE.gbps, SHAPE.delay_ms)
        for operation in sides["after"].operations:
            took: dict[str, list[float]] = {name: [] for name in SIDES}
            for number in range(WARM_UP + pairs):
                for name in SIDES if number % 2 else SIDES[::-1]:
                    took[name].append(sides[name].operations[operation]())
            kept = {name: seconds[WARM_UP:] for name, seconds in took.items()}
            ratios = [after / before for before, after in zip(*kept.values(), strict=True)]
            noise = [one / statistics.median(kept["before"]) for one in kept["before"]]
            rows.append({"operation": operation, "ratios": ratios, "noise": noise, **kept})
            print(operation, f"{statistics.median(ratios):.3f}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default=BEFORE, help="to compare with (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of each operation (default %(default)s)")
    arguments = parser.parse_args()
    rows = measure(arguments.commit, arguments.pairs)
    lines = [
        f"{SIZE_MB} MB over {SHAPE}, three sites: seconds of this code over those of commit {arguments.commit}, in "
        f"whose runs whatever came with a site's key was taken, measured in turn ({arguments.pairs} pairs). Median and "
        "range of the ratios of pairs; noise: range of the earlier code's own seconds over their median.",
        "",
        "| operation | before | after | ratio | from | to | noise |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        before, after = (statistics.median(row[name]) for name in SIDES)
        lines.append(
            f"| {row['operation']} | {before:.2f} s | {after:.2f} s | {statistics.median(row['ratios']):.3f} "
            f"| {min(row['ratios']):.2f} | {max(row['ratios']):.2f} "
            f"| {min(row['noise']):.2f} to {max(row['noise']):.2f} |"
        )
    write_result("against", {"seed": 1, "rows": rows}, "\n".join(lines))


if __name__ == "__main__":
    main()
