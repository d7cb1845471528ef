"""The local executor: every site is a group of processes on this machine.

Each process leads a session of its own, so that Ctrl-C at the terminal does not reach it and one signal reaches what it
started in its group. What left the group still carries HETRL_RUN and HETRL_SITE_DIRECTORY in its environment: the sweep
finds it by both, for two runs of one name and second may lie in different directories.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import hetrl
from hetrl.errors import HetrlError
from launch.executor import Exit
from launch.render import CONTROLLER, Job, Process
from launch.run_directory import Run

GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL: a rollout server closes its workers in that time
SWEEP_SECONDS = 3.0
_SAME_CREATION_SECONDS = 2.0  # the system derives creation times from its boot time, which moves with the clock


class LocalExecutor:
    """Starts, watches and stops the processes of one run."""

    lag_seconds = 0.0

    def __init__(self, run: Run) -> None:
        """Nothing is started yet."""
        self._run = run
        self._running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._started: dict[tuple[str, str], Process] = {}
        self._leaders: list[psutil.Process] = []

    def start(self, job: Job) -> list[dict[str, Any]]:
        """Start every task of a job and return what identifies each process: name, pid and creation time."""
        return [self._start(job.site, process) for process in job.tasks]

    def restart(self, site: str, name: str) -> dict[str, Any]:
        """Start a process that ended again, as it was, and return what identifies it."""
        return self._start(site, self._started[site, name])

    def _start(self, site: str, process: Process) -> dict[str, Any]:
        with self._run.log(site, process.name).open("ab") as log:
            try:
                started = subprocess.Popen(
                    [sys.executable if word == "python" else word for word in process.argv],
                    cwd=self._run.site(site),
                    env=_environment({**process.environment, _DIRECTORY: str(self._run.site(site))}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise HetrlError(f"{site}: cannot start {process.name}: {error.strerror}: {error.filename}") from None
        self._running[site, process.name] = started
        self._started[site, process.name] = process
        leader = psutil.Process(started.pid)
        self._leaders.append(leader)
        return {"name": process.name, "pid": started.pid, "created": leader.create_time()}

    def poll(self) -> list[Exit]:
        """Return the processes that ended since the last call."""
        exits = [
            Exit(site, name, code, leads=name == CONTROLLER)
            for (site, name), process in self._running.items()
            if (code := process.poll()) is not None
        ]
        for gone in exits:
            del self._running[gone.site, gone.process]
        return exits

    def names(self) -> list[str]:
        """Return the names of the processes that were running at the last poll."""
        return [name for _, name in self._running]

    def stop(self) -> list[str]:
        """End every process of the run; when it returns none is left."""
        stop_processes(self._run, self._leaders)
        return []


def prefixed(jobs: Iterable[Job], prefixes: Mapping[str, Sequence[str]]) -> tuple[Job, ...]:
    """Return the jobs with the words that a site's file wants before every command, by site."""
    return tuple(
        replace(job, tasks=tuple(replace(task, argv=(*prefixes[job.site], *task.argv)) for task in job.tasks))
        for job in jobs
    )


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment with what a process adds, without what only the launcher should have."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("HETRL_") and name != _VISIBLE
    }
    code = str(Path(hetrl.__file__).resolve().parent.parent)  # the members run the launcher's version
    paths = [code, *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "SPT_NOENV": "1", **added}


# SPT_NOENV keeps setproctitle, which vLLM's workers use, from writing a title over the environment that the sweep
# reads (https://github.com/dvarrazzo/py-setproctitle#environment-variables).
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DIRECTORY = "HETRL_SITE_DIRECTORY"


def processes_of(records: Iterable[Mapping[str, Any]]) -> list[psutil.Process]:
    """Return the recorded processes that still live; a number that another process has by now is not one of them."""
    found = []
    for record in records:
        try:
            process = psutil.Process(record["pid"])
        except psutil.NoSuchProcess:
            continue
        if abs(process.create_time() - record["created"]) < _SAME_CREATION_SECONDS and alive(process):
            found.append(process)
    return found


def stop_processes(run: Run, leaders: Iterable[psutil.Process]) -> int:
    """End the process groups of the leaders, then all else that carries this run; return how many processes lived."""
    leaders = [leader for leader in leaders if alive(leader)]
    found = {leader.pid for leader in leaders}
    _signal_groups(leaders, signal.SIGTERM)
    _wait(leaders, GRACE_SECONDS)
    _signal_groups(leaders, signal.SIGKILL)
    for attempt in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        remaining = carrying(run)
        if not remaining:
            break
        found.update(process.pid for process in remaining)
        _signal(remaining, attempt)
        _wait(remaining, SWEEP_SECONDS)
    return len(found)


def carrying(run: Run) -> list[psutil.Process]:
    """Return the living processes that were started for this run, this process and its parents apart."""
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            environment = {} if process.pid in spared else process.environ()
            if _is_of(run, environment) and alive(process):
                found.append(process)
        except (psutil.Error, OSError):  # another user's, a zombie, or gone meanwhile
            continue
    return found


def _is_of(run: Run, environment: Mapping[str, str]) -> bool:
    directory = environment.get(_DIRECTORY)
    return environment.get("HETRL_RUN") == run.id and directory is not None and run.path in Path(directory).parents


def alive(process: psutil.Process) -> bool:
    """Return whether a process still runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal_groups(leaders: Iterable[psutil.Process], number: signal.Signals) -> None:
    for leader in leaders:
        if alive(leader):
            try:
                os.killpg(leader.pid, number)
            except (ProcessLookupError, PermissionError):
                continue


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue


def _wait(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until all are gone, at most so long; nobody is reaped here, so exit codes stay with their parent."""
    deadline = time.monotonic() + seconds
    while any(alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
