"""Runs in which processes are killed and sites cut off at random: how much of the time goes into steps that count.

for the quickstart with real engines, and 64 emulated ranks at three sites:
    a run without faults
    the same with faults, from a seed: in every 10 minutes a tenth of its processes is killed, at random moments;
    every 5 minutes all links of a site are out for up to 15 s (its gateway stands still)
    goodput: the seconds of the steps that count, over all from the first plan to the last word; whether all
    steps trained on the samples, and had the rewards, of the run without
A launcher follows, and takes the run up where it fails (`launch.restarts`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml
from _fault_runs import GATEWAY, Place, site_and_module, sometimes_right, stand_still, to_the_end, until
from _results import ROOT, write_result

from hetrl.files import read_lines
from hetrl.workload import ITERATION

GOAL = 0.9
STEPS = {"quickstart": 1200, "64 emulated ranks": 300}  # a quarter of an hour or so
RATE, PERIOD_SECONDS = 0.1, 600.0  # of the processes, killed in so many seconds
CUT_EVERY_SECONDS, CUT_SECONDS = 300.0, (2.0, 15.0)
SITES = ("alpha", "beta", "gamma")
END_SECONDS = 3600.0
EMULATED = {"alpha": (24, "megatron"), "beta": (20, "vllm"), "gamma": (20, "vllm")}  # ranks


@dataclass(frozen=True)
class Fault:
    """What happened when, in seconds since the first step."""

    at_seconds: float
    what: str


@dataclass(frozen=True)
class Measured:
    """A run with faults beside the one without."""

    name: str
    processes: int
    steps: int
    seconds: float
    goodput: float
    goodput_without_faults: float
    attempts: int
    faults: Sequence[Fault]
    same_samples: bool
    same_rewards: bool


def experiments(work: Path) -> Mapping[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the changes to the quickstart, and to its section `launch`, that make each of the runs."""
    sites = []
    for site, (ranks, engine) in EMULATED.items():
        nodes = [{"name": f"{site}-{n}", "gpu": "cpu", "gpus": 4, "host_memory_gb": 8} for n in range(ranks // 4)]
        sites.append(str(work / f"{site}.yaml"))
        Path(sites[-1]).write_text(yaml.safe_dump({"name": site, "engines": [engine], "nodes": nodes}))
    return {
        "quickstart": (sometimes_right(work), {}),
        "64 emulated ranks": (
            {
                "topology": {"sites": sites, "links": str(ROOT / "topology/quickstart-links.yaml")},
                "warm_start": None,
                "batch": {"samples": 1280, "prompt_tokens": 4, "response_tokens": 3},
            },
            {"engines": "emulated"},
        ),
    }


def schedule(rng: random.Random, processes: int) -> Iterator[tuple[float, bool]]:
    """Yield for ever how long to wait for the next fault, and whether it is a cut and no kill."""
    kills, cuts = RATE * processes / PERIOD_SECONDS, 1 / CUT_EVERY_SECONDS
    while True:
        yield rng.expovariate(kills + cuts), rng.random() < cuts / (kills + cuts)


def disturb(place: Place, process: subprocess.Popen[str], rng: random.Random) -> tuple[int, list[Fault]]:
    """Kill processes and cut sites off until the run is over; return how many it had, and what was done."""
    until(place.rows, process)
    start, count, faults = time.monotonic(), len(place.processes()), list[Fault]()
    for seconds, is_cut in schedule(rng, count):
        try:
            process.wait(timeout=seconds)
            return count, faults
        except subprocess.TimeoutExpired:
            what = cut(place, rng) if is_cut else kill(place, rng)
            faults.append(Fault(time.monotonic() - start, what))
            print(f"{faults[-1].at_seconds:.0f} s: {what}", file=sys.stderr, flush=True)
    raise AssertionError


def kill(place: Place, rng: random.Random) -> str:
    """Kill a process of the run that goes on."""
    alive = sorted(place.processes(), key=lambda one: one.pid)
    if not alive:
        return "nothing to kill"
    victim = rng.choice(alive)
    try:
        site, module = site_and_module(victim)
        victim.kill()
    except psutil.Error:
        return "nothing to kill"
    return f"SIGKILL to {module} at {site}"


def cut(place: Place, rng: random.Random) -> str:
    """Let all links of a site be out for a while."""
    site, seconds = rng.choice(SITES), rng.uniform(*CUT_SECONDS)
    stand_still(place.processes(site, GATEWAY), seconds)
    return f"{site} cut off for {seconds:.0f} s"


def run(place: Place, rng: random.Random | None, *sections: Mapping[str, Any]) -> tuple[int, list[Fault]]:
    """Run an experiment, with faults where there is a generator for them; raises RuntimeError where it fails."""
    with place.submitting(*sections) as process:
        try:
            disturbed = disturb(place, process, rng) if rng else (0, [])
            to_the_end(process, END_SECONDS)
        finally:
            place.leave_nothing()
    return disturbed


def goodput(place: Place) -> tuple[float, float]:
    """Return how long all attempts took, and the share of it that went into steps that count.

    A step lasts from the end of the one before, the first one of an attempt as long as it says; what one took beyond
    twice the median, it stood still.
    """
    took, times = dict[int, float](), [event["time"] for event in place.events()]
    for one in place.runs():
        ends = [event for event in read_lines(one.events) if event["kind"] == "step"]
        took |= {event["step"]: event["seconds"][ITERATION] for event in ends[:1]}
        took |= {after["step"]: after["time"] - before["time"] for before, after in pairwise(ends)}
    seconds, most = max(times) - min(times), 2 * statistics.median(took.values())
    return seconds, sum(min(step, most) for step in took.values()) / seconds


def emptied(directory: Path) -> Path:
    """Remove what a bench that was stopped left there."""
    if directory.exists():
        shutil.rmtree(directory)
    return directory


def measure(name: str, changes: Mapping[str, Any], launch: Mapping[str, Any], work: Path, seed: int) -> Measured:
    """Run without faults and with them, unless those runs are there."""
    kept = {**changes, "rollouts": {"kept": True}}
    plain, disturbed, told = Place(work / "plain"), Place(work / "disturbed"), work / "faults.json"
    if not any(one.summary.exists() for one in plain.runs()):
        plain = Place(emptied(plain.work))
        run(plain, None, kept, launch)
    if not told.exists():
        disturbed = Place(emptied(disturbed.work))
        processes, faults = run(disturbed, random.Random(seed), kept, {**launch, "restarts": 20})
        told.write_text(json.dumps({"processes": processes, "faults": [asdict(one) for one in faults]}))
    known = json.loads(told.read_text())
    rewards, found = disturbed.rewards(), disturbed.samples()
    return Measured(
        name,
        known["processes"],
        len(rewards),
        *goodput(disturbed),
        goodput(plain)[1],
        len(disturbed.runs()),
        [Fault(**fault) for fault in known["faults"]],
        found == plain.samples() and found.keys() == rewards.keys(),
        rewards == plain.rewards(),
    )


def page(measured: Sequence[Measured]) -> str:
    """Return the benchmark's part of the page."""
    yes = {True: "yes", False: "NO"}
    rows = [
        f"| {one.name} | {one.processes} | {one.steps} | {one.seconds:.0f} s | {len(one.faults)} | {one.attempts} | "
        f"{one.goodput:.1%} | {one.goodput_without_faults:.1%} | {yes[one.same_samples]} | {yes[one.same_rewards]} |"
        for one in measured
    ]
    faults = [f"- {one.name}: {'; '.join(f'{f.at_seconds:.0f} s, {f.what}' for f in one.faults)}" for one in measured]
    head = (
        f"Runs in which {RATE:.0%} of all processes are killed in {PERIOD_SECONDS / 60:.0f} minutes and a site is "
        f"cut off for {CUT_SECONDS[0]:.0f} to {CUT_SECONDS[1]:.0f} s every {CUT_EVERY_SECONDS / 60:.0f} minutes, at "
        f"random; a checkpoint every second step. Goodput: the share of the time, starts and all that lies "
        f"between two attempts included, that went into steps that count, as long as each took no more than "
        f"twice the median (to reach: {GOAL:.0%}); "
        "no faults: of a run without, from which the starts are missing. "
        "Same: every step trained on the samples, and had the reward, of a run without faults."
    )
    columns = (
        "| run | processes | steps | took | faults | attempts | goodput | no faults | same samples | same rewards |"
    )
    return "\n".join([head, "", columns, "|" + " --- |" * 10, *rows, "", *faults])


def main() -> None:
    """Run all, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--only", help="the run of this name; nothing is written")
    parser.add_argument("--steps", type=int, help="of each run; nothing is written")
    parser.add_argument("--kept", type=Path, help="a directory for the runs, for a bench that is stopped")
    arguments = parser.parse_args()
    measured = []
    with tempfile.TemporaryDirectory(prefix="hetrl-goodput-") as directory:
        place = (arguments.kept or Path(directory)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        for number, (name, (changes, launch)) in enumerate(experiments(place).items()):
            if arguments.only in (None, name):
                steps, work = {"steps": arguments.steps or STEPS[name]}, place / str(number)
                measured.append(measure(name, {**changes, **steps}, launch, work, arguments.seed))
    table = page(measured)
    if not (arguments.only or arguments.steps):
        write_result("goodput", {"seed": arguments.seed, "runs": [asdict(one) for one in measured]}, table)
    print(table)


if __name__ == "__main__":
    main()
