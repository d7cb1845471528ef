"""What the wrapper of a Slurm step says of a process that a signal ended: `logs/<process>.killed`, with its name.

The controller sees the files of its own site, the lead's, where the actor is trained. A process that is killed has no
last word, and its silence takes longer to tell.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from hetrl.runtime import wire
from hetrl.workload import ACTOR_GENERATION, TASKS

LOGS = Path("logs")
_KILLED = ".killed"


def note_start(process: str) -> None:
    """Forget the end of an earlier life of a process."""
    (LOGS / f"{process}{_KILLED}").unlink(missing_ok=True)


def note_end(process: str, code: int) -> None:
    """Note by which signal a process was ended, where `code`, as a shell counts it, says that it was."""
    if code > 128:
        with suppress(OSError):  # a full disk: then its silence has to tell
            (LOGS / f"{process}{_KILLED}").write_text(_name_of(code - 128))


def killed_at(directory: Path, site: str) -> dict[str, str]:
    """Return the addresses of a site's processes that were killed, and the signals; `directory` is the site's."""
    found = {}
    for path in (directory / LOGS).glob(f"*{_KILLED}"):
        task, _, number = path.name.removesuffix(_KILLED).rpartition("-")
        if task in TASKS and number.isdigit() and (name := path.read_text()):
            role = task if task == ACTOR_GENERATION else task + wire.RANK
            found[wire.address(site, role, int(number))] = name
    return found


def _name_of(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
