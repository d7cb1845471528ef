"""Where the checkpoints of a task lie: those that it writes, and those of the runs that this one goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetrl.runtime.checkpoints import files


@dataclass(frozen=True)
class EarlierRun:
    """A directory that an earlier run had at this site; of its checkpoints those up to the step `left_at` count.

    There a later run took it up: what it wrote behind that is of another history than what the later one wrote, and an
    actor of the one does not belong to a critic of the other. None: it was taken up where it ended.
    """

    directory: Path
    left_at: int | None = None

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> EarlierRun:
        """Return what `to_json` gave."""
        return cls(Path(read["directory"]), read["left_at"])

    def to_json(self) -> dict[str, Any]:
        """Return it as site.json has it."""
        return {"directory": str(self.directory), "left_at": self.left_at}

    def has(self, step: int) -> bool:
        """Whether a checkpoint of a step counts."""
        return self.left_at is None or step <= self.left_at


@dataclass(frozen=True)
class CheckpointPlaces:
    """Directories with checkpoints of a task: `own`, where it writes, and those of earlier runs, the latest first.

    Of a checkpoint's files a rank proves its share, one of as many as its world has ranks at this site.
    """

    own: Path
    earlier: tuple[EarlierRun, ...] = ()
    share: int = 0
    shares: int = 1

    def written(self, step: int) -> Path:
        """Return where the checkpoint of a step is written."""
        return files.path_of(self.own, step)

    def find(self) -> dict[int, Path]:
        """Return the whole checkpoints by their step, each from the latest run that has it."""
        found = files.whole(self.own)
        for run in self.earlier:
            found = {**{step: path for step, path in files.whole(run.directory).items() if run.has(step)}, **found}
        return found

    def read(self, step: int, name: str) -> bytes:
        """Return a file of a whole checkpoint; nothing where it has none of that name."""
        path = self.find()[step] / name
        return path.read_bytes() if path.is_file() else b""


def places_of(task: str, earlier: Sequence[EarlierRun] = (), share: tuple[int, int] = (0, 1)) -> CheckpointPlaces:
    """Return the places of a task; `earlier` are the runs before, with their directories at this site.

    Its own is in the site's directory, where its processes start. `share` is which of how many proves checkpoints here.
    """
    below = files.root_of(task)
    return CheckpointPlaces(below, tuple(replace(run, directory=run.directory / below) for run in earlier), *share)
