"""What a controller needs to go on after a step, as the actor's checkpoints keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hetrl.errors import HetrlError, UsageError
from hetrl.files import read_lines
from hetrl.runtime.rl.feed import Position


@dataclass(frozen=True)
class Progress:
    """Where a run is: `version` of the actor's weights, what the feed gave.

    `prompts` are those of a batch, which numbers of prompts count in.
    """

    version: int
    prompts: int
    position: Position

    @property
    def step(self) -> int:
        """Return how many steps were taken."""
        return self.position.batches

    def to_text(self) -> str:
        """Return it as a checkpoint keeps it."""
        return msgspec.json.encode(self).decode()


def read_progress(text: str, prompts: int) -> Progress:
    """Read what a checkpoint keeps of a run whose batches have so many prompts.

    Raises HetrlError where it is something else, UsageError where its batches have another number of prompts.
    """
    try:
        found = msgspec.json.decode(text, type=Progress)
    except msgspec.DecodeError as error:
        raise HetrlError(f"what the checkpoint keeps of its run cannot be read: {error}") from None
    if found.prompts != prompts:
        raise UsageError(
            f"the run to go on from had {found.prompts} prompts per batch, the experiment has {prompts}: prompts would "
            "be skipped or trained on twice; leave batch.samples and samples_per_prompt as they were"
        )
    return found


def rows_until(paths: Sequence[Path], step: int, now: float) -> tuple[list[dict[str, Any]], float]:
    """Return the metrics of the steps to this one, from the file that has the most of them, the first of such.

    A row may be missing: a checkpoint may be whole before its row is written, or come home. Then the seconds since the
    first start of its run `now` (in UNIX time): steps that were lost, too, and the time since its last row.
    """
    files = [[*read_lines(path)] for path in paths]
    found = max(files, key=lambda rows: sum(row["step"] <= step for row in rows), default=[])
    last = found[-1] if found else {}
    spent_seconds = last.get("elapsed_seconds", 0.0) + max(now - last.get("time", now), 0.0)
    return [row for row in found if row["step"] <= step], spent_seconds
