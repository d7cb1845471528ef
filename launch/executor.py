"""What the follower of a run needs of an executor: who ended, who lives, and an end for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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
