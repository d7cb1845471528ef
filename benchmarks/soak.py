"""A run that lasts an hour: whether memory and descriptors of its processes stay flat, and what it leaves behind.

the quickstart with a checkpoint every second step, for so many minutes, followed by its launcher; then `hetrl cancel`
    every few seconds, of each process: its anonymous memory, how many descriptors are open; pages of mapped files are
    left out, whose share falls to a process when its neighbours that map them end
    the first third is left out (allocators and caches fill up); then the slope of a line through the least of each
    minute
    behind the run: processes, and what is in the system's temporary directory and /dev/shm that was not there before
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import psutil
from _fault_runs import Place, site_and_module, until
from _results import write_result

from hetrl.runtime.temporary import MEMORY

EVERY_SECONDS = 10.0
ENDLESS = 1_000_000  # steps
END_SECONDS = 120.0
LEFT_OUT = 1 / 3  # of the time
GROWTH_MB, GROWTH_DESCRIPTORS = (
    10.0,
    2.0,
)  # per hour that still count as flat: less than a tenth of the smallest process
TEMPORARY = (Path(tempfile.gettempdir()), MEMORY)


@dataclass(frozen=True)
class Sample:
    """What a process has at some time: megabytes of anonymous memory, open descriptors."""

    at_seconds: float
    own_mb: float
    descriptors: int


@dataclass(frozen=True)
class Trend:
    """A process over the time that counts: its means, and by how much both grow in an hour."""

    process: str
    own_mb: float
    descriptors: float
    mb_per_hour: float
    descriptors_per_hour: float

    @property
    def flat(self) -> bool:
        """Return whether neither grows."""
        return self.mb_per_hour <= GROWTH_MB and self.descriptors_per_hour <= GROWTH_DESCRIPTORS


def name_of(process: psutil.Process) -> str:
    """Return where a process runs, and which module; raises psutil.Error of one that ended."""
    site, module = site_and_module(process)
    return f"{site} {module.removeprefix('hetrl.runtime.')} {process.pid}"


def watch(place: Place, launcher: subprocess.Popen[str], seconds: float) -> dict[str, list[Sample]]:
    """Take samples of all processes of a run and of its launcher."""
    found: dict[str, list[Sample]] = {}
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        if launcher.poll() is not None:
            raise RuntimeError(f"the run ended after {now:.0f} s with code {launcher.returncode}")
        for process in (*place.processes(), psutil.Process(launcher.pid)):
            with suppress(psutil.Error):
                memory = process.memory_info()
                own = (memory.rss - memory.shared) / 1e6
                found.setdefault(name_of(process), []).append(Sample(now, own, process.num_fds()))
        print(f"{now:.0f} s: step {len(place.rows())}, {len(found)} processes", file=sys.stderr, flush=True)
        time.sleep(EVERY_SECONDS)
    return found


def trend(process: str, samples: Sequence[Sample], seconds: float) -> Trend | None:
    """Return the trend of a process; None of one that is there for less than half of the time that counts."""
    counted = [one for one in samples if one.at_seconds >= LEFT_OUT * seconds]
    if len(counted) < seconds * (1 - LEFT_OUT) / EVERY_SECONDS / 2:
        return None
    # Of each minute the least: requests that are open at the moment of a look come and go, what leaks stays.
    minutes = [[*each] for _, each in groupby(counted, lambda one: one.at_seconds // 60)]
    times = [each[0].at_seconds / 3600 for each in minutes]
    memory = [min(one.own_mb for one in each) for each in minutes]
    descriptors = [float(min(one.descriptors for one in each)) for each in minutes]
    slopes = (statistics.linear_regression(times, values).slope for values in (memory, descriptors))
    return Trend(process, statistics.mean(memory), statistics.mean(descriptors), *slopes)


def temporary() -> set[Path]:
    """Return what lies in the system's temporary directories."""
    return {path for directory in TEMPORARY if directory.is_dir() for path in directory.iterdir()}


def soak(work: Path, seconds: float) -> tuple[list[Trend], int, list[str]]:
    """Run for so long; return the trends, how many steps there were, and what was left behind."""
    before, place = temporary(), Place(work)
    with place.submitting({"steps": ENDLESS}, {"walltime": "12:00:00"}) as launcher:
        try:
            until(place.rows, launcher)
            samples = watch(place, launcher, seconds)
            steps = len(place.rows())
            place.popen(["cancel", place.runs()[-1].id], {"stdout": subprocess.DEVNULL}).wait(END_SECONDS)
            launcher.wait(END_SECONDS)
            left = [f"process {process.pid}" for process in place.processes()]
        finally:
            place.leave_nothing()
    left += [str(path) for path in sorted(temporary() - before)]
    trends = [trend(process, taken, seconds) for process, taken in sorted(samples.items())]
    return [one for one in trends if one], steps, left


def page(trends: Sequence[Trend], facts: Mapping[str, float], left: Sequence[str]) -> str:
    """Return the benchmark's part of the page."""
    flat = sum(one.flat for one in trends)
    head = (
        f"The quickstart for {facts['minutes']:.0f} minutes, {facts['steps']} steps, a checkpoint every second one. Of "
        f"each process its anonymous memory, its open descriptors, and by how much both grow in an hour, by a "
        f"line through the least of each minute but those of the first third. Flat: at most {GROWTH_MB:.0f} MB and "
        f"{GROWTH_DESCRIPTORS:.0f} descriptors; {flat} of {len(trends)} processes are. Left behind: "
        f"{', '.join(left) or 'nothing'}."
    )
    rows = [
        f"| {one.process.rsplit(' ', 1)[0]} | {one.own_mb:.0f} MB | {one.mb_per_hour:+.1f} MB | {one.descriptors:.0f} "
        f"| {one.descriptors_per_hour:+.1f} | {'yes' if one.flat else 'NO'} |"
        for one in trends
    ]
    columns = "| process | memory | in an hour | descriptors | in an hour | flat |"
    return "\n".join([head, "", columns, "|" + " --- |" * 6, *rows])


def main() -> None:
    """Run, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory(prefix="hetrl-soak-") as directory:
        trends, steps, left = soak(Path(directory) / "soak", minutes * 60)
    facts = {"minutes": minutes, "steps": steps}
    table = page(trends, facts, left)
    write_result("soak", {**facts, "processes": [asdict(one) for one in trends], "left_behind": left}, table)
    print(table)


if __name__ == "__main__":
    main()
