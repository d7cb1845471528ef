"""Where the checkpoints of a task lie: those that it writes, and those of the runs that this one goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetrl.runtime.checkpoints import files


@dataclass(frozen=True)
class CheckpointPlaces:
    """Directories with checkpoints of a task: `own`, where it writes, and those of earlier runs, the latest first."""

    own: Path
    earlier: tuple[Path, ...] = ()

    def written(self, step: int) -> Path:
        """Return where the checkpoint of a step is written."""
        return files.path_of(self.own, step)

    def find(self) -> dict[int, Path]:
        """Return the whole checkpoints by their step, each from the latest run that has it."""
        found: dict[int, Path] = {}
        for root in (self.own, *self.earlier):
            found = {**files.whole(root), **found}
        return found

    def read(self, step: int, name: str) -> bytes:
        """Return a file of a whole checkpoint; nothing where it has none of that name."""
        path = self.find()[step] / name
        return path.read_bytes() if path.is_file() else b""


def places_of(task: str, earlier: Sequence[Path] = ()) -> CheckpointPlaces:
    """Return the places of a task; `earlier` are the directories that earlier runs had at this site.

    Its own is in the site's directory, where its processes start.
    """
    below = files.root_of(task)
    return CheckpointPlaces(below, tuple(directory / below for directory in earlier))
