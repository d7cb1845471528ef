"""When a run writes checkpoints: the trainer copies its state, and writes it while the next steps run.

after a step:   a checkpoint under way that all ranks have written is completed
when one is due, and after the last step:   the one under way is waited for, then the next begins
after the last step:   that one is waited for too; it may be another one than the run was to have (`LastStep`)

Each that is whole is wanted at other sites, too, as `Copies` sees to; the one that is copied is not removed meanwhile.
Nor is the last one of which every model that is trained has its own: a run goes on from no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hetrl.describe.experiment import Checkpoints
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.files import newest_step
from hetrl.runtime.rl.tasks import Trainer
from hetrl.runtime.run.record import Record


class Copies(Protocol):
    """Who copies checkpoints to other sites."""

    def wanted(self, task: str, step: int) -> None:
        """Note that the checkpoint of a step is whole."""

    def under_way(self) -> int | None:
        """Return the step whose checkpoints are being copied."""


class _NoCopies:
    def wanted(self, task: str, step: int) -> None:
        """Copy nothing."""

    def under_way(self) -> int | None:
        """Return that nothing is copied."""


NO_COPIES = _NoCopies()


class WholeSteps:
    """Of which steps each of some tasks has a whole checkpoint, as far as is known: the disk has more, if any."""

    def __init__(self, tasks: Iterable[str]) -> None:
        """Begin with none."""
        self._steps = {task: set[int]() for task in tasks}
        self._going: dict[str, set[int]] = {}  # by each task of which older ones go, what it spares

    def begin_with(self, step: int) -> None:
        """Note that there are those from which the run goes on."""
        self._steps = {task: {step} for task in self._steps}

    def spared(self, task: str, step: int) -> set[int]:
        """Return which steps of a task must stay when older ones go as that of `step` is whole, until `settled`.

        That is the last step of which every task has one then, and those which others count on that remove theirs
        meanwhile; where others have none of `step` yet, also the one before it, of which they may have theirs by then.
        """
        last = newest_step({**self._steps, task: {*self._steps[task], step}})
        before = max(self._steps[task], default=None) if last != step else None
        found = set[int]().union(*self._going.values(), [one for one in (last, before) if one is not None])
        self._going[task] = found
        return found

    def settled(self, task: str, step: int, *, whole: bool) -> None:
        """Note what became of it: of older ones only those that were spared are certain to be left."""
        spared = self._going.pop(task)
        if whole:
            self._steps[task] = {step, *(self._steps[task] & spared)}


class LastStep:
    """Which step is the last: the one that a run was to have, or is trained when Slurm ends the job of a `site`."""

    def __init__(self, number: int, record: Record) -> None:
        """Begin with that of the experiment."""
        self.number, self.site = number, ""
        self._record = record
        self._reached: int | None = None

    def reach(self, step: int) -> None:
        """Note that a step is trained, or that the run goes on behind it."""
        self._reached = max(step, self._reached or 0)
        self._choose()

    def end_soon(self, site: str) -> None:
        """Take the step that is trained now, or else the first one, for the last: Slurm ends the job of a site."""
        self.site = self.site or site
        self._choose()

    def _choose(self) -> None:
        if self.site and self._reached is not None and self._reached + 1 < self.number:
            self.number = self._reached + 1
            self._record.events.append("ending", site=self.site, step=self.number)


@dataclass
class _UnderWay:
    step: int
    begun: float  # of the monotonic clock
    waited_seconds: float = 0.0


class CheckpointSchedule:
    """The checkpoints of a model up to the `last` step; `after` each step it asks the trainer for what is due."""

    def __init__(
        self,
        trainer: Trainer,
        record: Record,
        settings: Checkpoints,
        last: LastStep,
        whole: WholeSteps,
        copies: Copies = NO_COPIES,
    ) -> None:
        self._trainer, self._record, self._settings = trainer, record, settings
        self._last, self._whole, self._copies = last, whole, copies
        self._under_way: _UnderWay | None = None

    async def first(self, version: int, progress: str) -> None:
        """Write one before the first step."""
        await self._begin(0, version, progress)
        await self._finish(wait=True)

    async def after(self, step: int, version: int, progress: str = "", samples: Callable[[], bytes] = bytes) -> None:
        """Begin and complete checkpoints after a step; HetrlError when one could not be written.

        `progress` is what the controller needs to go on from there, `samples` returns those that are under way.
        """
        self._last.reach(step)
        last = step == self._last.number
        due = last or step % self._settings.every_steps == 0
        await self._finish(wait=due)
        if due:
            await self._begin(step, version, progress, samples())
        if last:
            await self._finish(wait=True)

    async def _begin(self, step: int, version: int, progress: str, samples: bytes = b"") -> None:
        begun = time.monotonic()
        saved = await self._trainer.save(step, version, progress, samples)
        self._under_way = _UnderWay(step, begun, saved.seconds)

    async def _finish(self, *, wait: bool) -> None:
        """Complete the checkpoint under way, if any, and note it; without `wait` only when it is written."""
        ours = self._under_way
        if ours is None:
            return
        keep, keep_gb = self._settings.keep, self._settings.keep_gb
        spared, copied = self._whole.spared(self._trainer.task, ours.step), self._copies.under_way()
        if copied is not None:
            spared = spared | {copied}
        request = wire.FinishSave(step=ours.step, keep=keep, keep_gb=keep_gb, spared=tuple(sorted(spared)), wait=wait)
        saved = await self._trainer.finish_save(request)
        self._whole.settled(self._trainer.task, ours.step, whole=saved.whole)
        ours.waited_seconds += saved.seconds
        if saved.whole:
            self._record.saved(saved, time.monotonic() - ours.begun, ours.waited_seconds)
            self._copies.wanted(self._trainer.task, ours.step)
            self._under_way = None
