"""Who starts a run's processes, and what its launcher needs of that: who ended, who lives, and an end for all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rich.console import Console

from hetrl.describe.sites import SiteFile
from hetrl.errors import HetrlError
from hetrl.files import EventLog
from launch.run_directory import Run
from launch.shell import LOCAL, Shell
from launch.state import State

ExecutorName = Literal["slurm", "local"]
SLURM: ExecutorName = "slurm"
HERE: ExecutorName = "local"
LOGIN_SECONDS = 20.0


@dataclass(frozen=True)
class Started:
    """What was started at a site: a process (local) or a job (Slurm), its role, and what messages call it.

    A process is GATEWAY, CONTROLLER, or of a task of the plan; a job is CONTROLLER where it holds that, else GANG or
    ARRAY. A run that has begun can go on without what is `spare`: it has but replicas of generation.
    """

    site: str
    name: str
    role: str
    spoken: str
    spare: bool = False


@dataclass(frozen=True)
class Exit:
    """A process or job that ended: its exit code, negative for a signal; `how` is what Slurm calls a job's end."""

    what: Started
    code: int
    how: str = ""


class Executor(Protocol):
    """Starts a run's processes somewhere; `lag_seconds` is how old what `poll` returns may be.

    What it started goes on without this process where `outlives`; where an earlier one started the run, which this one
    `adopts`, that goes on also when something could not be started. The run `begins_without` what is spare where its
    experiment says so.
    """

    lag_seconds: float
    outlives: bool
    adopts: bool
    begins_without: bool

    @property
    def elsewhere(self) -> str:
        """Return what of the run lies elsewhere, and where; nothing where all of it is here."""

    def start(self, interrupted: Callable[[], int | None]) -> None:
        """Start what is not started yet; `interrupted` returns the signal that shall end this, once there is one."""

    def poll(self) -> Sequence[Exit]:
        """Return what ended since the last call, without waiting for anyone."""

    def alive(self) -> Sequence[Started]:
        """Return what was alive at the last poll."""

    def leave(self) -> None:
        """Look no more; what does not outlive this process is ended."""

    def stop(self) -> Sequence[str]:
        """End everything of the run; return a line for each part that could not be ended."""


# From the launcher's events, and what they say so far.
MakeExecutor = Callable[[EventLog, Callable[[], State]], Executor]


@dataclass(frozen=True)
class Prepared:
    """A run that lies in its directory and is started nowhere yet.

    `agree` returns whether it shall be, and may ask: it gets the console, and whether all answers are yes.
    """

    run: Run
    executor: MakeExecutor
    agree: Callable[[Console, bool], bool] = lambda console, always_yes: True


def choose_executor(asked: Literal["auto"] | ExecutorName, sites: Sequence[SiteFile]) -> ExecutorName:
    """Return what the experiment asks for; for auto slurm where a site has a login node, or is a cluster here.

    A site that is a cluster names its `scratch`.
    """
    if asked != "auto":
        return asked
    if any(site.ssh != LOCAL for site in sites) or (any(site.scratch for site in sites) and _slurm_is_here()):
        return SLURM
    return "local"


def _slurm_is_here() -> bool:
    """Return whether this machine has sbatch, perhaps for login shells alone: those are what sites are asked by."""
    if shutil.which("sbatch") is not None:
        return True
    try:
        return Shell(LOCAL).run(["bash", "-lc", "command -v sbatch"], timeout_seconds=LOGIN_SECONDS).code == 0
    except HetrlError:
        return False
