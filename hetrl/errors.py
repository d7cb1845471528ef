"""The errors that a user of hetrl may see, each with the exit code of the command line.

    HetrlError (1)
      UsageError (2)            bad input: a file, a key, a value, a flag
      InfeasibleError (3)       no plan satisfies the constraints
      SiteUnreachableError (4)  a site does not answer
      PartialError (5)          done in some places, not in others
      GangTimeoutError (6)      a member of the run did not come up in time
      TimeUpError (7)           Slurm ends a job of the run; what was trained is kept

A message says what is wrong, where, and what to do next:
`alpha: partition "gpu" allows 24 h, asked 36 h; lower launch.walltime or set sites.alpha.partition`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class HetrlError(Exception):
    """A failure that the command line reports as one short message.

    One that `travels` comes back as its kind where another process reports it; what only the one that raises it can
    mean does not.
    """

    exit_code = 1
    travels = True


def error_of(exit_code: int, message: str) -> HetrlError:
    """Return the error of this exit code: how an error that another process reports is raised here."""
    for kind in HetrlError.__subclasses__():
        if kind.travels and vars(kind).get("exit_code") == exit_code:  # other kinds are told apart by more than a code
            return kind(message)
    return HetrlError(message)


class UsageError(HetrlError):
    """The input is wrong: the message names the file, the key or the flag, and the nearest right one."""

    exit_code = 2


class InfeasibleError(HetrlError):
    """No plan satisfies the constraints: the message names the tightest one."""

    exit_code = 3


class SiteUnreachableError(HetrlError):
    """A site did not answer within its deadline."""

    exit_code = 4


class PartialError(HetrlError):
    """The command reached some sites and not others: the message names what remains."""

    exit_code = 5


class GangTimeoutError(HetrlError):
    """A member of the run was not ready when the gang timeout ended."""

    exit_code = 6


class TimeUpError(HetrlError):
    """The time of a job is up: the run has kept its last step, and ends."""

    exit_code = 7


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean "x"?` for the nearest known word, or nothing where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """Return `unknown what "name"` with the nearest known one and all of them, in their order."""
    return f'unknown {what} "{name}"{nearest(name, known)}; known: {", ".join(known)}'
