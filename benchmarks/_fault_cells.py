"""The cells of the bench `faults`: what is hit, in which phase of a run, and what came of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from _results import ROOT

from hetrl.files import read_lines
from hetrl.workload import ITERATION
from launch.local import carrying, stop_processes
from launch.run_directory import Run

STEPS, AT_STEP = 12, 4  # faults are behind the step that the second number says
END_SECONDS, PHASE_SECONDS = 300.0, 180.0
KILL, STOP = "SIGKILL", "SIGSTOP"
PATIENCE, HANG, ORPHAN = "00:00:10", "00:00:30", "00:01:00"
RANK, ROLLOUT, SERVER = "hetrl.runtime.run.trainer", "hetrl.runtime.run.rollout", "vllm.entrypoints.cli.main"
GATEWAY, CONTROLLER = "hetrl.runtime.gateway.gateway_process", "hetrl.runtime.run.controller"
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
PAUSED = {f"{STOP} for {seconds} s": seconds for seconds in (5, 30)}  # less than the run's patience, and more


@dataclass(frozen=True)
class Cell:
    """A fault: the part, the signal that all of its processes get (perhaps for a while), the phase in which they do."""

    part: str
    fault: str
    phase: str


CELLS = (
    *(Cell(part, KILL, phase) for part in PARTS for phase in PHASES),
    *(Cell(part, STOP, GENERATION) for part in STANDS),
    *(Cell(part, fault, phase) for part in PAUSES for fault in PAUSED for phase in (GENERATION, PUBLICATION)),
)


@dataclass(frozen=True)
class Undisturbed:
    """A run without faults: the reward of each step, and the seconds of an iteration and of its parts."""

    rewards: Sequence[float]
    iteration_seconds: float
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Found:
    """What came of a fault; `same` says whether all rewards are those of the undisturbed run."""

    cell: Cell
    outcome: str
    finished: bool
    seconds: float | None = None
    taken_again: int | None = None
    same: bool | None = None


def undisturbed(work: Path) -> Undisturbed:
    """Run without a fault."""
    with _following(work, "submit", str(_config(work)), "--yes") as process:
        _, said = process.communicate(timeout=END_SECONDS)
    if process.returncode:
        raise RuntimeError(f"the run without faults ended with code {process.returncode}: {said}")
    rows = _rows(_runs(work)[-1])
    last = rows[-1]["seconds"]
    return Undisturbed([row["reward"] for row in rows], last[ITERATION], last)


def play(cell: Cell, work: Path, plain: Undisturbed) -> Found:
    """Run until the phase, do what the cell says, and see what comes of it."""
    with _following(work, "submit", str(_config(work)), "--yes") as process:
        try:
            _until_phase(cell, work, process, plain)
            hit, before = time.time(), _last_step(work)
            count = _hit(cell, work, process)
            if cell.part == LAUNCHER:
                process.wait()
                code, said = _resumed(work)
            else:
                _, said = process.communicate(timeout=END_SECONDS)
                code = process.returncode
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            return Found(cell, f"hangs: {error}", finished=False)
        finally:
            _end(work)
    if not count:
        return Found(cell, "not hit: no such process", finished=False)
    if code:
        cause = next((line for line in said.splitlines() if line.startswith("error: ")), said[-200:])
        return Found(cell, f"ends with code {code}: {cause.removeprefix('error: ').split('; see ')[0]}", finished=False)
    events = [event for run in _runs(work) for event in read_lines(run.events)]
    after = [event["time"] - hit for event in events if event["kind"] == "step" and event["time"] > hit]
    resumed = [event["step"] for event in events if event["kind"] == "resumed"]
    rewards = [row["reward"] for row in _rows(_runs(work)[-1])]
    again = max(before - min(resumed), 0) if resumed else 0
    return Found(
        cell, _outcome(events, len(_runs(work))), True, min(after, default=None), again, rewards == plain.rewards
    )


def _outcome(events: Sequence[Mapping[str, Any]], runs: int) -> str:
    """Return in a few words how a run went on."""
    kinds = [event["kind"] for event in events]
    if runs > 1:
        return "taken up from a checkpoint"
    if "replica_lost" in kinds:
        return "goes on without, and with it again" if "replica_back" in kinds else "goes on without"
    if "replica_back" in kinds:
        return "started again, draws again"
    return "started again" if "restarted" in kinds else "ridden out"


# --- the run ----------------------------------------------------------------------------------------------------------


def _config(work: Path) -> Path:
    """Write the quickstart without a warm start, with faults in mind."""
    document = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    del document["warm_start"]
    launch = {"patience": PATIENCE, "hang_timeout": HANG, "orphan_timeout": ORPHAN, "restarts": 3}
    document |= {"steps": STEPS, "planner": {"solver": "streamrl"}, "checkpoints": {"every_steps": 2}}
    document["launch"] |= launch
    work.mkdir(parents=True)
    (work / "topology").symlink_to(ROOT / "topology")
    path = work / "faults.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def _following(work: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a verb that follows a run."""
    command = [sys.executable, "-m", "launch.cli", *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=work, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def _resumed(work: Path) -> tuple[int, str]:
    """Go on as the user does whose launcher was killed."""
    with _following(work, "resume", _runs(work)[-1].id, "--yes") as process:
        _, said = process.communicate(timeout=END_SECONDS)
    return process.returncode, said


def _runs(work: Path) -> list[Run]:
    return [Run(path) for path in sorted((work / "runs").resolve().glob("*"))]


def _rows(run: Run) -> list[dict[str, Any]]:
    return [*read_lines(run.metrics)]


def _last_step(work: Path) -> int:
    rows = _rows(_runs(work)[-1])
    return rows[-1]["step"] if rows else 0


# --- phases and faults ------------------------------------------------------------------------------------------------


def _until_phase(cell: Cell, work: Path, process: subprocess.Popen[str], plain: Undisturbed) -> None:
    if cell.phase == START:
        _until(lambda: _processes(work, *PARTS[cell.part]) or (cell.part == LAUNCHER and _runs(work)), process)
        time.sleep(1.0)
        return
    if cell.phase == CHECKPOINT:
        pattern = f"sites/alpha/checkpoints/*/step-{AT_STEP:08d}*"
        _until(lambda: any(path for run in _runs(work)[-1:] for path in run.path.glob(pattern)), process)
        return
    _until(lambda: _runs(work) and any(row["step"] >= AT_STEP for row in _rows(_runs(work)[-1])), process)
    generation, whole = plain.seconds["generation_wait"], plain.iteration_seconds
    published = plain.seconds.get("publish", plain.seconds.get("weight_sync", 0.0))
    trained = max(whole - generation - published, 0.0)
    time.sleep({GENERATION: generation / 2, TRAINING: generation + trained / 2}.get(cell.phase, whole - published / 2))


def _until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PHASE_SECONDS
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError("the phase did not come")
        time.sleep(0.01)


def _processes(work: Path, site: str, module: str) -> list[psutil.Process]:
    """Return the processes of a run at a site that run a module, or all of the site's."""
    found = []
    for process in (one for run in _runs(work) for one in carrying(run)):
        with suppress(psutil.Error):
            if Path(process.cwd()).name == site and (not module or module in process.cmdline()):
                found.append(process)
    return found


def _hit(cell: Cell, work: Path, launcher: subprocess.Popen[str]) -> int:
    """Send the signal, for a while where the cell says so; return how many processes got it."""
    number = signal.Signals[cell.fault.split()[0]]
    if cell.part == LAUNCHER:
        launcher.send_signal(number)
        return 1
    hit = _processes(work, *PARTS[cell.part])
    _send(hit, number)
    if seconds := PAUSED.get(cell.fault):
        time.sleep(seconds)
        _send(hit, signal.SIGCONT)
    return len(hit)


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _end(work: Path) -> None:
    """Leave no process behind."""
    for run in _runs(work):
        stop_processes(run, ())
