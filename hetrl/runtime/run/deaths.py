"""Files that say of processes without a last word that they have ended: their silence takes longer to tell.

    logs/<process>.killed    by a signal, which the file names, as the wrapper of a Slurm step saw
    released.<site>          all rollouts of a site, whose nodes `hetrl release` gives back

The controller sees the files of its own site, the lead's, where the actor is trained.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.workload import ACTOR_GENERATION, TASKS

LOGS = Path("logs")
_KILLED = ".killed"
RELEASED = "released."


class ReleasedError(HetrlError):
    """The nodes of a replica were given back: the run was told to go on without."""


def note_start(process: str) -> None:
    """Forget the end of an earlier life of a process."""
    (LOGS / f"{process}{_KILLED}").unlink(missing_ok=True)


def note_end(process: str, code: int) -> None:
    """Note by which signal a process was ended, where `code`, as a shell counts it, says that it was."""
    if code > 128:
        with suppress(OSError):  # a full disk: then its silence has to tell
            (LOGS / f"{process}{_KILLED}").write_text(_name_of(code - 128))


def released_at(directory: Path) -> set[str]:
    """Return the sites whose rollouts were given back; `directory` is the lead site's."""
    return {path.name.removeprefix(RELEASED) for path in directory.glob(f"{RELEASED}*")}


def killed_at(directory: Path, site: str) -> dict[str, str]:
    """Return the addresses of a site's processes that were killed, and the signals; `directory` is the site's."""
    found = {}
    for path in (directory / LOGS).glob(f"*{_KILLED}"):
        task, _, number = path.name.removesuffix(_KILLED).rpartition("-")
        if task in TASKS and number.isdigit():
            role = task if task == ACTOR_GENERATION else task + wire.RANK
            with suppress(FileNotFoundError):  # it is started again just now
                found[wire.address(site, role, int(number))] = path.read_text()
    return {address: name for address, name in found.items() if name}


def _name_of(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
