"""Runs of which every process is killed at a random moment, and that `hetrl resume` takes up: whether they are exact.

a run of a dozen steps over three sites, with a checkpoint every second one; then, for each of some moments from a seed:
    the same run until then, from the first sign of life to the last step; SIGKILL to all of its processes at once, and
    to its launcher
    `hetrl resume`: whether all steps trained on the samples, had the rewards and served the weights, to the last bit,
    of the run that nobody killed; how long until the next step was done, and how many steps were taken again
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _fault_runs import Place, kill_session, send, sometimes_right, to_the_end, until
from _results import write_result

from hetrl.files import append_line, read_lines

STEPS, MOMENTS = 12, 20
END_SECONDS = 600.0


@dataclass(frozen=True)
class Whole:
    """What a run that nobody killed had: samples, reward and digest of the weights of each step."""

    samples: Mapping[int, list[tuple[str, str]]]
    rewards: Mapping[int, float]
    digests: Mapping[int, str]
    seconds: float  # from the first sign of life to the last step


@dataclass(frozen=True)
class Killed:
    """A run that was killed: when, behind which step, and what came of it."""

    at_seconds: float
    step: int
    processes: int
    taken_again: int
    next_step_seconds: float
    same_samples: bool
    same_rewards: bool
    same_weights: bool

    @property
    def exact(self) -> bool:
        """Return whether nothing tells it from the run that nobody killed."""
        return self.same_samples and self.same_rewards and self.same_weights


def found_in(place: Place, began: float = 0.0) -> Whole:
    """Return what the runs of a place had; of a step that was taken again, the last time."""
    events = place.events()
    digests = {event["version"]: event["digest"] for event in events if event["kind"] == "weights_published"}
    last = max(event["time"] for event in events if event["kind"] == "step")
    return Whole(place.samples(), place.rewards(), digests, last - began)


def undisturbed(place: Place, changes: Mapping[str, Any]) -> Whole:
    """Run to the end."""
    with place.submitting(changes) as process:
        until(place.runs, process)
        began = time.time()
        to_the_end(process, END_SECONDS, "the run that nobody killed")
    return found_in(place, began)


def killed(place: Place, changes: Mapping[str, Any], whole: Whole, at_seconds: float) -> Killed:
    """Run until then, kill everything, go on, and compare."""
    with place.submitting(changes) as process:
        until(place.runs, process)
        began = time.monotonic()
        # At the latest ahead of the last step: this machine may be faster than it was for the run that nobody killed.
        while time.monotonic() - began < at_seconds and len(place.rows()) < STEPS - 1:
            time.sleep(0.02)
        kill_session(process)
        process.wait()
        hit = place.processes()
        send(hit, signal.SIGKILL)
    step, when = len(place.rows()), time.time()
    try:
        with place.following("resume", place.runs()[-1].id) as process:
            to_the_end(process, END_SECONDS, f"the run that was killed after {at_seconds:.1f} s")
    finally:
        place.leave_nothing()
    events = place.events()
    after = min(event["time"] - when for event in events if event["kind"] == "step" and event["time"] > when)
    resumed = max((event["step"] for event in events if event["kind"] == "resumed"), default=0)
    found = found_in(place)
    return Killed(
        at_seconds,
        step,
        len(hit),
        max(step - resumed, 0),
        after,
        found.samples == whole.samples,
        found.rewards == whole.rewards,
        found.digests == whole.digests,
    )


def row_of(one: Killed) -> str:
    """Return the row of the table."""
    same = (one.same_samples, one.same_rewards, one.same_weights)
    words = " | ".join("yes" if each else "NO" for each in same)
    return (
        f"| {one.at_seconds:.1f} s | {one.step} | {one.processes} | {one.taken_again} | {one.next_step_seconds:.1f} s "
        f"| {words} |"
    )


def page(found: Sequence[Killed]) -> str:
    """Return the benchmark's part of the page."""
    head = (
        f"Runs of {STEPS} steps over three sites, with a checkpoint every second step, all of whose processes get "
        f"SIGKILL at a random moment, their launcher's too, and which `hetrl resume` takes up: "
        f"{sum(one.exact for one in found)} of {len(found)} have the samples, the rewards and, to the last bit, the "
        f"weights of the run that nobody killed. At: since the launcher had made the run's directory. Next step: from "
        f"`hetrl resume` until it was done."
    )
    columns = "| at | behind step | processes | taken again | next step | same samples | same rewards | same weights |"
    return "\n".join([head, "", columns, "|" + " --- |" * 8, *map(row_of, found)])


def main() -> None:
    """Kill at all moments, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--moments", type=int, help="so many; nothing is written")
    parser.add_argument("--kept", type=Path, help="a file for what is found, for a bench that is stopped")
    arguments = parser.parse_args()
    draws, moments = random.Random(arguments.seed), arguments.moments or MOMENTS
    found = [Killed(**row) for row in read_lines(arguments.kept)] if arguments.kept else []
    with tempfile.TemporaryDirectory(prefix="hetrl-kills-") as directory:
        work = Path(directory)
        changes = {"steps": STEPS, "rollouts": {"kept": True}, **sometimes_right(work)}
        whole = undisturbed(Place(work / "whole"), changes)
        for number, share in enumerate([draws.random() for _ in range(moments)]):
            if number >= len(found):
                found.append(killed(Place(work / str(number)), changes, whole, share * whole.seconds))
                if arguments.kept:
                    append_line(arguments.kept, asdict(found[-1]))
            print(row_of(found[number]), flush=True)
    table = page(found)
    if not arguments.moments:
        write_result("kills", {"seed": arguments.seed, "moments": [asdict(one) for one in found]}, table)
    print(table)


if __name__ == "__main__":
    main()
