"""The notice that Slurm ends a site's job soon: a file that the job's script leaves in the site's directory."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

ENDING = "ending"  # slurm_templates/gang.sbatch.j2
LOOK_SECONDS = 1.0  # between two looks for it


@dataclass
class _Looks:
    """The looks for the notice in one directory: the last one, and what they found."""

    began: float = -math.inf
    thread: Thread | None = None
    found: bool = False

    def look(self, notice: Path) -> None:
        with suppress(OSError):  # what cannot be looked at now may be the next time
            self.found = notice.exists()


# By site directory. Members of one process share the looks: an emulated site has a thousand of them.
_looks: dict[Path, _Looks] = {}


def ends_soon(directory: Path) -> bool:
    """Return whether the script of a site's job has left `ENDING` in the site's directory, as far as is known.

    Whoever asks does not wait for the look, which may hang for as long as the server of the directory does.
    """
    looks, now = _looks.setdefault(directory, _Looks()), time.monotonic()
    under_way = looks.thread is not None and looks.thread.is_alive()
    if not (looks.found or under_way) and now - looks.began >= LOOK_SECONDS:
        looks.began = now
        looks.thread = Thread(target=looks.look, args=(directory / ENDING,), daemon=True)
        looks.thread.start()
    return looks.found
