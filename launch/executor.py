"""Who starts a run's processes, and what its follower needs of that: who ended, who lives, and an end for all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetrl.describe.sites import SiteFile
from launch.shell import LOCAL


@dataclass(frozen=True)
class Exit:
    """A process (local) or job (Slurm) that ended: its exit code, negative for a signal.

    `leads`: the run cannot go on without it. `how` is what Slurm calls the end, where that says more than the code.
    """

    site: str
    process: str
    code: int
    leads: bool = False
    how: str = ""


class Executor(Protocol):
    """Starts a run's processes somewhere; `lag_seconds` is how old what `poll` returns may be."""

    lag_seconds: float

    def poll(self) -> Sequence[Exit]:
        """Return what ended since the last call, without waiting for anyone."""

    def names(self) -> Sequence[str]:
        """Return what was alive at the last poll."""

    def stop(self) -> Sequence[str]:
        """End everything of the run; return a line for each part that could not be ended."""


def choose_executor(asked: str, sites: Sequence[SiteFile]) -> str:
    """Return what the experiment asks for; for auto slurm where a site has a login node, or is a cluster here.

    A site that is a cluster names its `scratch`.
    """
    if asked != "auto":
        return asked
    here = shutil.which("sbatch") is not None
    return "slurm" if any(site.ssh != LOCAL or (site.scratch and here) for site in sites) else "local"
