"""Whole runs for tests: `hetrl submit` in a directory of its own, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lab.lab import ROOT


@dataclass(frozen=True)
class Finished:
    """What a `hetrl submit` left behind."""

    code: int
    stdout: str
    stderr: str
    directory: Path

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def digests(self) -> list[str]:
        """Return the digest of every weight version, in order."""
        return [row["digest"] for row in self.summary()["weight_versions"]]

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


class Submitted:
    """A `hetrl submit` that goes on; `until` and `finish` wait for what it does."""

    def __init__(self, process: subprocess.Popen[str], work: Path) -> None:
        self._process, self._work = process, work

    @property
    def directory(self) -> Path:
        """Return the run's directory, and one that does not exist while there is none."""
        directories = sorted((self._work / "runs").glob("*"))
        return directories[-1] if directories else self._work / "no-run"

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds so far."""
        return events_of(self.directory, *kinds)

    def until(self, kind: str, count: int) -> None:
        """Wait for so many events of a kind; fails where the run ends first."""
        while len(self.events(kind)) < count:
            assert self._process.poll() is None, f"the run ended: {self.finish().stderr}"
            time.sleep(0.02)

    def next_directory(self, before: Path) -> Path:
        """Wait until the launcher takes a run up again; return the directory of the run that goes on."""
        while self.directory == before:
            assert self._process.poll() is None, f"it is not taken up: {self.finish().stderr}"
            time.sleep(0.02)
        return self.directory

    def kill(self) -> None:
        """Kill the launcher, which has no last word then."""
        self._process.kill()
        self._process.communicate()

    def interrupt(self) -> None:
        """End the run by the launcher's way."""
        self._process.terminate()

    def finish(self) -> Finished:
        """Wait for the end."""
        stdout, stderr = self._process.communicate(timeout=900)
        assert_nothing_left(self.directory)
        assert [path.name for path in temporary_of(self._work).rglob("*")] == []
        return Finished(self._process.returncode, stdout, stderr, self.directory)


def submitted(config: Path, work: Path, *arguments: str) -> AbstractContextManager[Submitted]:
    """Run `hetrl submit` in a directory of its own; relative names in the configuration are those of the repository."""
    return started(work, "submit", str(config), *arguments)


@contextmanager
def started(work: Path, *arguments: str) -> Iterator[Submitted]:
    """Run a verb that follows a run in a directory of its own."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "topology").exists() or (work / "topology").symlink_to(ROOT / "topology")
    command = [sys.executable, "-m", "launch.cli", *arguments]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    temporary = temporary_of(work)
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, cwd=work, env=environment, text=True, **pipes) as process:
        try:
            yield Submitted(process, work)
        finally:
            process.terminate()
            process.wait()
            with suppress(OSError):  # what is left in it is for the run that goes on to remove
                temporary.rmdir()


def temporary_of(work: Path) -> Path:
    """Return the temporary directory of what is started in a directory; sockets in it have a short path."""
    return Path("/tmp") / f"hetrl-t-{zlib.crc32(bytes(work.absolute())):08x}"


def submit(config: Path, work: Path, *arguments: str) -> Finished:
    """Run `hetrl submit` to its end."""
    with submitted(config, work, *arguments) as run:
        return run.finish()


def events_of(directory: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the events of these kinds of a run."""
    path = directory / "events.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [event for event in map(json.loads, whole) if event["kind"] in kinds]


def job_ids(directory: Path) -> dict[tuple[str, str], str]:
    """Return Slurm's id of each job of a run, by its site and name."""
    return {(each["site"], each["job"]): each["job_id"] for each in events_of(directory, "submitted")}


def drew_again(directory: Path, replica: str, behind: int) -> int:
    """Return the first step behind one in which a replica drew samples; 0 while there is none."""
    lines = (directory / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()
    rows = (json.loads(line) for line in lines)
    return next((row["step"] for row in rows if row["step"] > behind and replica in row["replicas"]), 0)


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return the processes of a run in this directory, or of a site of it."""
    return processes_where("HETRL_SITE_DIRECTORY", lambda site: Path(site).is_relative_to(directory.resolve()))


def processes_where(variable: str, holds: Callable[[str], bool]) -> list[psutil.Process]:
    """Return the processes that were started with an environment variable of which something holds."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            value = process.environ().get(variable)
            if value is not None and holds(value):
                found.append(process)
    return found


def assert_nothing_left(directory: Path) -> None:
    """No process of the run in this directory lives on."""
    left = []
    for process in processes_of(directory):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            left.append(process.cmdline())
    assert left == []
