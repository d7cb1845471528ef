"""A run with faults in mind, as its user starts and follows it, its processes, and what disturbs these."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from _results import ROOT

from hetrl.files import read_lines
from launch.local import carrying, stop_processes
from launch.run_directory import Run

PHASE_SECONDS = 180.0
GATEWAY, CONTROLLER = "hetrl.runtime.gateway.gateway_process", "hetrl.runtime.run.controller"
PATIENCE, HANG, ORPHAN = "00:00:10", "00:00:30", "00:01:00"


def write_config(work: Path, changes: Mapping[str, Any], launch: Mapping[str, Any] = {}) -> Path:
    """Write the quickstart without a warm start, taken up again by itself where it fails, with changes."""
    document = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    del document["warm_start"]
    document |= {"planner": {"solver": "streamrl"}, "checkpoints": {"every_steps": 2}, **changes}
    document["launch"] |= {"patience": PATIENCE, "hang_timeout": HANG, "orphan_timeout": ORPHAN, **launch}
    work.mkdir(parents=True)
    (work / "topology").symlink_to(ROOT / "topology")
    path = work / "faults.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def following(work: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a verb that follows a run."""
    command = [sys.executable, "-m", "launch.cli", *words]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=work, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def runs_of(work: Path) -> list[Run]:
    """Return the runs of a directory, the first one and those that took it up."""
    return [Run(path) for path in sorted((work / "runs").resolve().glob("*"))]


def rows_of(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of its steps."""
    return [*read_lines(run.metrics)]


def processes_of(work: Path, site: str, module: str = "") -> list[psutil.Process]:
    """Return the processes of the runs at a site that run a module, or all of the site's."""
    found = []
    for process in (one for run in runs_of(work) for one in carrying(run)):
        with suppress(psutil.Error):
            if Path(process.cwd()).name == site and (not module or module in process.cmdline()):
                found.append(process)
    return found


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for a moment of a run; raises TimeoutError where it does not come."""
    deadline = time.monotonic() + PHASE_SECONDS
    while not condition():
        if time.monotonic() > deadline or process.poll() is not None:
            raise TimeoutError("the phase did not come")
        time.sleep(0.01)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send all of them a signal."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stand_still(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Let processes do nothing for a while: those of a gateway as if all links of its site were out."""
    send(processes, signal.SIGSTOP)
    time.sleep(seconds)
    send(processes, signal.SIGCONT)


def leave_nothing(work: Path) -> None:
    """End what is left of the runs."""
    for run in runs_of(work):
        stop_processes(run, ())
