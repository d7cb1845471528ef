"""The cells of the bench `faults`: what is hit, in which phase of a run, and what came of it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _fault_runs import CHECKPOINTS, CONTROLLER, GATEWAY, Place, kill_session, send, stand_still, to_the_end, until

from hetrl.workload import ITERATION

STEPS, AT_STEP = 12, 4  # faults are behind the step that the second number says
END_SECONDS = 300.0
COPY_AT = "gamma"
KILL, STOP = "SIGKILL", "SIGSTOP"
RANK, ROLLOUT, SERVER = "hetrl.runtime.run.trainer", "hetrl.runtime.run.rollout", "hetrl.runtime.vllm.serve"
LAUNCHER = "launcher"
# Part of a run: the site, and the module that its processes run; nothing: all of the site's.
PARTS: Mapping[str, tuple[str, str]] = {
    "trainer": ("alpha", RANK),
    "rollout": ("gamma", ROLLOUT),
    "rollout's vLLM": ("gamma", SERVER),
    "gateway": ("gamma", GATEWAY),
    "lead's gateway": ("alpha", GATEWAY),
    "controller": ("alpha", CONTROLLER),
    "all of a site": ("gamma", ""),
    "all of the lead site": ("alpha", ""),
    LAUNCHER: ("", ""),
}
START, GENERATION, TRAINING, PUBLICATION, CHECKPOINT = "start", "generation", "training", "publication", "checkpoint"
PHASES = (START, GENERATION, TRAINING, PUBLICATION, CHECKPOINT)
STANDS = ("trainer", "rollout", "rollout's vLLM", "controller")  # those that may stand still
PAUSES = ("gateway", "lead's gateway")  # those that may do so for a while, as if their links were out
GONE = "lost for good"  # its files, too, and on clusters the nodes and Slurm; checkpoints have a copy elsewhere
PAUSED = {f"{STOP} for {seconds} s": seconds for seconds in (5, 30)}  # less than the run's patience, and more


@dataclass(frozen=True)
class Cell:
    """A fault: the part, the signal that all of its processes get (perhaps for a while), the phase in which they do."""

    part: str
    fault: str
    phase: str


MAIN = (
    Cell("trainer", KILL, GENERATION),
    Cell("trainer", KILL, TRAINING),
    Cell("trainer", STOP, GENERATION),
    Cell("rollout", KILL, GENERATION),
    Cell("rollout's vLLM", KILL, GENERATION),
    Cell("rollout's vLLM", STOP, GENERATION),
    Cell("gateway", KILL, GENERATION),
    Cell("lead's gateway", KILL, PUBLICATION),
    Cell("controller", KILL, GENERATION),
    Cell("all of a site", KILL, GENERATION),
    Cell("all of the lead site", KILL, GENERATION),
    Cell("all of the lead site", GONE, TRAINING),
    Cell(LAUNCHER, KILL, TRAINING),
)
CELLS = (
    *(Cell(part, KILL, phase) for part in PARTS for phase in PHASES),
    *(Cell(part, STOP, GENERATION) for part in STANDS),
    *(Cell(part, fault, phase) for part in PAUSES for fault in PAUSED for phase in (GENERATION, PUBLICATION)),
    Cell("all of the lead site", GONE, TRAINING),
)


@dataclass(frozen=True)
class Undisturbed:
    """A run without faults: the reward of each step, and the seconds of an iteration and of its parts."""

    rewards: Sequence[float]
    iteration_seconds: float
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Found:
    """What came of a fault; `same` says whether all rewards are those of the undisturbed run.

    `seconds` until the next step was done, `given_up` until the run was, where another one went on.
    """

    cell: Cell
    outcome: str
    finished: bool
    given_up: float | None = None
    seconds: float | None = None
    taken_again: int | None = None
    same: bool | None = None


def undisturbed(place: Place, changes: Mapping[str, Any]) -> Undisturbed:
    """Run without a fault."""
    with place.submitting({**changes, "steps": STEPS}) as process:
        to_the_end(process, END_SECONDS, "the run without faults")
    rows = place.rows()
    last = rows[-1]["seconds"]
    return Undisturbed([row["reward"] for row in rows], last[ITERATION], last)


def play(cell: Cell, place: Place, changes: Mapping[str, Any], plain: Undisturbed) -> Found:
    """Run until the phase, do what the cell says, and see what comes of it."""
    copied = {"checkpoints": {**CHECKPOINTS, "copy_to": [COPY_AT]}} if cell.fault == GONE else {}
    with place.submitting({**changes, **copied, "steps": STEPS}, {"restarts": 3}) as process:
        try:
            _until_phase(cell, place, process, plain)
            hit, before = time.time(), _last_step(place)
            count = _hit(cell, place, process)
            if cell.part == LAUNCHER:
                process.wait()
                code, said = _resumed(place)
            else:
                _, said = process.communicate(timeout=END_SECONDS)
                code = process.returncode
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            return Found(cell, f"hangs: {error}", finished=False)
        finally:
            place.leave_nothing()
    if not count:
        return Found(cell, "not hit: no such process", finished=False)
    if code:
        cause = next((line for line in reversed(said.splitlines()) if line.startswith("error: ")), said[-200:])
        return Found(cell, f"ends with code {code}: {cause.removeprefix('error: ').split('; see ')[0]}", finished=False)
    return _judged(cell, place, plain, hit, before)


def _judged(cell: Cell, place: Place, plain: Undisturbed, hit: float, before: int) -> Found:
    """Return what came of a fault in a run that came to its end; `before` is the last step before it."""
    events = place.events()
    after = [event["time"] - hit for event in events if event["kind"] == "step" and event["time"] > hit]
    resumed = [event["step"] for event in events if event["kind"] == "resumed"]
    again = max(before - min(resumed), 0) if resumed else 0
    given_up = [event["time"] - hit for event in events if event["kind"] == "failed"]
    same = [row["reward"] for row in place.rows()] == plain.rewards
    seconds = min(given_up, default=None), min(after, default=None)
    return Found(cell, _outcome(events, place.plans()), True, *seconds, again, same)


def _outcome(events: Sequence[Mapping[str, Any]], plans: Sequence[bytes]) -> str:
    """Return in a few words how a run went on; `plans` are those of the runs that it took."""
    kinds = [event["kind"] for event in events]
    if len(plans) > 1:
        return "taken up from a checkpoint" + (", by another plan" if len(set(plans)) > 1 else "")
    if "replica_lost" in kinds:
        return "goes on without, and with it again" if "replica_back" in kinds else "goes on without"
    if "replica_back" in kinds:
        return "started again, draws again"
    return "started again" if "restarted" in kinds else "ridden out"


def _resumed(place: Place) -> tuple[int, str]:
    """Go on as the user does whose launcher was killed: again and again while a local run goes on by itself."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        with place.following("resume", place.runs()[-1].id) as process:
            _, said = process.communicate(timeout=END_SECONDS)
        if process.returncode == 0 or ": it runs;" not in said or time.monotonic() > deadline:
            return process.returncode, said
        time.sleep(2.0)


def _last_step(place: Place) -> int:
    rows = place.rows()
    return rows[-1]["step"] if rows else 0


# --- phases and faults ------------------------------------------------------------------------------------------------


def _until_phase(cell: Cell, place: Place, process: subprocess.Popen[str], plain: Undisturbed) -> None:
    if cell.phase == START:
        until(lambda: place.runs() if cell.part == LAUNCHER else place.processes(*PARTS[cell.part]), process)
        time.sleep(1.0)
        return
    if cell.phase == CHECKPOINT:
        pattern = f"sites/alpha/checkpoints/step-{AT_STEP:08d}*"
        until(lambda: any(path for run in place.runs()[-1:] for path in run.path.glob(pattern)), process)
        return
    until(lambda: _last_step(place) >= AT_STEP and (cell.fault != GONE or place.copied()), process)
    generation, whole = plain.seconds["generation_wait"], plain.iteration_seconds
    published = plain.seconds.get("publish", plain.seconds.get("weight_sync", 0.0))
    trained = max(whole - generation - published, 0.0)
    time.sleep({GENERATION: generation / 2, TRAINING: generation + trained / 2}.get(cell.phase, whole - published / 2))


def _hit(cell: Cell, place: Place, launcher: subprocess.Popen[str]) -> int:
    """Send the signal, for a while where the cell says so; return how many processes got it."""
    if cell.part == LAUNCHER:
        kill_session(launcher)
        return 1
    if cell.fault == GONE:
        return place.lose(PARTS[cell.part][0])
    hit = place.processes(*PARTS[cell.part])
    if seconds := PAUSED.get(cell.fault):
        stand_still(hit, seconds)
    else:
        send(hit, signal.Signals[cell.fault])
    return len(hit)
