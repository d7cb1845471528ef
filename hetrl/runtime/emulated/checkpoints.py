"""Checkpoints of emulated trainers: what a controller asks to be kept, and nothing else.

`step-00000120/` under the task's directory holds `emulated.json`, which comes in one piece.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetrl.errors import HetrlError
from hetrl.files import replace_json
from hetrl.runtime import wire
from hetrl.workload import ACTOR_TRAINING

FILE = "emulated.json"


@dataclass(frozen=True)
class Checkpoints:
    """The directory of a task, and those that it had in the runs that this one goes on from, the latest first."""

    own: Path
    earlier: tuple[Path, ...] = ()

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is written."""
        return _path(self.own, step)

    def save(self, message: wire.Save) -> Path:
        """Write what belongs to a step; return its directory."""
        directory = self.path(message.step)
        directory.mkdir(parents=True, exist_ok=True)
        replace_json(directory / FILE, {"version": message.version, "progress": message.progress})
        return directory

    def keep_last(self, count: int) -> None:
        """Remove all but the newest, and that of step 0, which a run began with."""
        for step in sorted(_steps(self.own), reverse=True)[count:]:
            if step:
                shutil.rmtree(_path(self.own, step))

    def find(self) -> tuple[int, ...]:
        """Return the steps that can be taken up."""
        return tuple(sorted({step for root in (self.own, *self.earlier) for step in _steps(root)}))

    def restore(self, step: int) -> wire.Restored:
        """Return what was kept of a step, by the latest run that has it; HetrlError where none has."""
        for root in (self.own, *self.earlier):
            if (path := _path(root, step) / FILE).is_file():
                return wire.Restored(step=step, **json.loads(path.read_text()))
        raise HetrlError(f"{_path(self.own, step).name}: no site has this checkpoint")


def _path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def _steps(root: Path) -> list[int]:
    return [int(path.parent.name.removeprefix("step-")) for path in root.glob(f"step-*/{FILE}")]


def checkpoints_of(directory: Path, task: str, continues: Sequence[Path]) -> Checkpoints:
    """Return the checkpoints of a task at a site, where real engines have theirs."""
    below = Path("checkpoints") if task == ACTOR_TRAINING else Path("checkpoints") / task
    return Checkpoints(directory / below, tuple(earlier / below for earlier in continues))
