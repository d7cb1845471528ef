"""When a run asks its trainer for checkpoints, and what it notes of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.describe.experiment import Checkpoints
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.tasks import Trainer
from hetrl.runtime.run.checkpoints import CheckpointSchedule, LastStep, WholeSteps
from hetrl.runtime.run.record import Record
from hetrl.runtime.transport.member import Member
from hetrl.workload import ACTOR_TRAINING


class Answers:
    """The other end of the wire: it has written a checkpoint when it was asked for the `asked`th time without wait."""

    def __init__(self, asked: int) -> None:
        self.asked, self.left = asked, 0
        self.heard: list[tuple[Any, ...]] = []

    async def request(self, to: str, message: wire.Message, *_: Any, **__: Any) -> Any:
        assert isinstance(message, (wire.Save, wire.FinishSave))
        whole = False
        if isinstance(message, wire.Save):
            self.left = self.asked
            self.heard.append(("save", message.step, message.version))
        else:
            self.left -= 1
            whole = message.wait or self.left == 0
            self.heard.append(("finish", message.step, message.keep, message.wait, whole))
        saved = wire.Saved(step=message.step, directory=f"c/{message.step}", seconds=0.25, whole=whole)
        return SimpleNamespace(message=saved, buffers=())


def events_of(trainer: Any, directory: Path, steps: int) -> list[dict[str, Any]]:
    """Return what a run with a checkpoint after every third step noted."""
    asked = Trainer(cast(Member, trainer), "actor_training", "trainer", ())
    record = Record(directory, "alpha")
    settings, last = Checkpoints(every_steps=3, keep=2), LastStep(steps, record)
    schedule = CheckpointSchedule(asked, record, settings, last, WholeSteps([ACTOR_TRAINING]))

    async def run() -> None:
        for step in range(1, steps + 1):
            await schedule.after(step, version=step + 10)

    asyncio.run(run())
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "checkpoint"]


def test_a_checkpoint_is_noted_when_it_is_written_and_the_last_one_is_waited_for(tmp_path: Path) -> None:
    trainer = Answers(asked=2)
    noted = events_of(trainer, tmp_path, 7)
    assert trainer.heard == [
        ("save", 3, 13),
        ("finish", 3, 2, False, False),
        ("finish", 3, 2, False, True),
        ("save", 6, 16),
        ("finish", 6, 2, True, True),
        ("save", 7, 17),
        ("finish", 7, 2, True, True),
    ]
    assert [(event["step"], event["waited_seconds"]) for event in noted] == [(3, 0.75), (6, 0.5), (7, 0.5)]
    assert all(event["seconds"] >= 0 for event in noted)


def test_a_slow_disk_is_waited_for_when_the_next_checkpoint_is_due(tmp_path: Path) -> None:
    trainer = Answers(asked=99)
    events_of(trainer, tmp_path, 6)
    assert trainer.heard[3:] == [("finish", 3, 2, True, True), ("save", 6, 16), ("finish", 6, 2, True, True)]


def test_a_checkpoint_that_could_not_be_written_ends_the_run(tmp_path: Path) -> None:
    class Full(Answers):
        async def request(self, to: str, message: wire.Message, *_: Any, **__: Any) -> Any:
            if isinstance(message, wire.FinishSave):
                raise HetrlError("checkpoints/step-3: no space")
            return await super().request(to, message)

    with pytest.raises(HetrlError, match="no space"):
        events_of(Full(1), tmp_path, 6)
