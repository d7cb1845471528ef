"""Checkpoints at several sites, as the controller sees them: copies of each, and those that a run goes on from.

    newest()            the last step of which every model has one, at whichever site: a keeper of each is asked
    bring(step)         those of a step to where their models are trained, where they are elsewhere
    wanted(task, step)  a whole one is to be copied: to the first site of checkpoints.copy_to that is another one
    serve()             copies one after another, beside the steps; what cannot be copied is an event, and no end

Those of a step are copied once every model has its own, all before those of another step: a run goes on from no single
one. Of the steps that wait, the newest and step 0, with the weights that the run began with, are copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from hetrl.errors import HetrlError
from hetrl.files import read_json
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.files import TAKES_UP, newest_step
from hetrl.runtime.run.context import Context
from hetrl.runtime.run.record import Record
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.runtime.wire.members import keepers_of
from hetrl.workload import ACTOR_TRAINING, TRAININGS

FIND_SECONDS = 120.0
LOOK_SECONDS = 2.0  # between two looks whether those that copy still live
log = logging.getLogger(__name__)


class KeptCheckpoints:
    """Asks keepers; `living` returns the members that take part, in whose processes they are."""

    def __init__(self, context: Context, member: Member, record: Record, living: Callable[[], Collection[str]]) -> None:
        self._context, self._member, self._record, self._living = context, member, record, living
        self._keepers = keepers_of(context.plan)
        self._trained = [task for task in TRAININGS if task in context.plan.tasks]
        self._found: dict[str, dict[int, str]] = {}
        self._whole = dict[int, set[str]]()  # of which models, of steps that not all have yet
        self._waiting: list[int] = []  # steps
        self._current: int | None = None
        self._copied: int | None = None  # the last step of which all are at the other site
        self._more, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    # ---- going on

    async def newest(self) -> int | None:
        """Return the last step of which there is a checkpoint of every model that is trained; None: there is none.

        Raises HetrlError where that is before the one which the launcher saw: its site has no member here, or does not
        answer. To go on from an earlier one would leave what came behind it for good.
        """
        for task in self._trained:
            own = wire.site_of(self._trainer(task))
            sites = sorted(self._context.plan.site_order, key=lambda site: site != own)
            keepers = [keeper for site in sites if (keeper := self._keeper_at(site)) is not None]
            answers = await asyncio.gather(*(self._steps(keeper, task) for keeper in keepers))
            self._found[task] = {}
            for keeper, steps in zip(keepers, answers, strict=True):
                self._found[task] = {**dict.fromkeys(steps, keeper), **self._found[task]}
        newest, seen = newest_step(self._found), self._context.directory / TAKES_UP
        wanted = read_json(seen) if seen.exists() else None
        if wanted is not None and (newest is None or newest < wanted["step"]):
            site = wanted["site"]
            found = "none is found" if newest is None else f"that of step {newest} is the last found"
            raise HetrlError(
                f"{site}: the run goes on after step {wanted['step']}, whose checkpoint is there, and {found}; resume "
                f"once jobs at {site} start and its disk answers, or go on without it (--without {site})"
            )
        return newest

    async def bring(self, step: int, *, first: bool) -> bool:
        """See that the checkpoints of the newest step are where their models are trained, and of the `first`, too.

        Returns whether there is one of the actor from before the first step.
        """
        for task in self._trained:
            for one in sorted({step, *([0] if first and task == ACTOR_TRAINING else [])} & {*self._found[task]}):
                await self._bring(task, one)
        return 0 in self._found[ACTOR_TRAINING]

    async def _bring(self, task: str, step: int) -> None:
        source, trainer = self._found[task][step], self._trainer(task)
        if wire.site_of(source) != wire.site_of(trainer):
            taken = await self._take(self._keepers[trainer], task, step, source)
            self._record.copied(task, taken, wire.site_of(trainer))

    async def _steps(self, keeper: str, task: str) -> Sequence[int]:
        doing = f"find checkpoints of {task} at {wire.site_of(keeper)}"
        try:
            reply = await self._member.request(
                keeper, wire.FindCheckpoints(task=task), timeout_seconds=FIND_SECONDS, doing=doing
            )
        except RunAborted:
            raise
        except HetrlError as error:
            log.warning("%s", error)
            return ()
        assert isinstance(reply.message, wire.FoundCheckpoints)
        return reply.message.steps

    # ---- copies

    def wanted(self, task: str, step: int) -> None:
        """Note that the checkpoint of a step is whole, and to be copied where the experiment says so."""
        if not self._context.experiment.checkpoints.copy_to:
            return
        whole = self._whole.setdefault(step, set())
        whole.add(task)
        if whole >= {*self._of(step)}:
            self._whole = {one: tasks for one, tasks in self._whole.items() if one > step}
            self._waiting = [*(one for one in self._waiting if one == 0), step]
            self._idle.clear()
            self._more.set()

    def _of(self, step: int) -> Sequence[str]:
        """Return the models that have a checkpoint of a step: before the first one only the actor has."""
        return self._trained if step > 0 else [ACTOR_TRAINING]

    def under_way(self) -> int | None:
        """Return the step whose checkpoints are being copied."""
        return self._current

    async def serve(self) -> None:
        """Copy what is wanted, for as long as the run lasts."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._waiting:
                self._current = step = self._waiting.pop(0)
                if await self._copy_all(step) and step > 0:
                    self._copied = step
                self._current = None
            self._idle.set()

    async def settle(self) -> None:
        """Wait until nothing is to be copied any more."""
        await self._idle.wait()

    async def _copy_all(self, step: int) -> bool:
        """Copy those of a step; those that they follow go with the last one."""
        before = () if self._copied is None else (self._copied,)
        *others, last = self._of(step)
        for task in others:
            if not await self._copy(task, step, spared=before):
                return False
        return await self._copy(last, step)

    async def _copy(self, task: str, step: int, spared: tuple[int, ...] = ()) -> bool:
        """Copy one; return whether it is at the other site."""
        trainer = self._trainer(task)
        own, preferred = wire.site_of(trainer), self._context.experiment.checkpoints.copy_to
        targets = [keeper for site in preferred if site != own and (keeper := self._keeper_at(site)) is not None]
        if not targets:
            self._record.not_copied(task, step, f"none of {', '.join(preferred)} takes part beside {own}")
            return False
        try:
            taken = await self._take(targets[0], task, step, self._keepers[trainer], spared)
        except RunAborted:
            raise
        except HetrlError as error:
            self._record.not_copied(task, step, str(error))
            return False
        self._record.copied(task, taken, wire.site_of(targets[0]))
        return True

    async def _take(
        self, keeper: str, task: str, step: int, source: str, spared: tuple[int, ...] = ()
    ) -> wire.CheckpointTaken:
        """Have one keeper take a checkpoint from another; HetrlError where it cannot, or as soon as either is gone."""
        what = f"the checkpoint of {task} after step {step} to {wire.site_of(keeper)}"
        lend = wire.LendCheckpoint(task=task, step=step, to=keeper)
        await self._member.request(source, lend, timeout_seconds=FIND_SECONDS, doing=f"lend {what}")
        asking = asyncio.create_task(
            self._member.request(
                keeper,
                wire.TakeCheckpoint(task=task, step=step, source=source, spared=spared),
                timeout_seconds=self._context.experiment.launch.walltime_seconds,
                doing=f"copy {what}",
            )
        )
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_SECONDS))[0]:
                if gone := next((one for one in (keeper, source) if not self._lives(one)), None):
                    raise HetrlError(f"{wire.site_of(gone)}: {gone} is gone (copy {what})")
            reply = asking.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert isinstance(reply.message, wire.CheckpointTaken)
        return reply.message

    def _lives(self, keeper: str) -> bool:
        """Return whether the member takes part in whose process a keeper is."""
        return any(self._keepers.get(member) == keeper for member in self._living())

    def _trainer(self, task: str) -> str:
        (address,) = self._context.addresses(task)
        return address

    def _keeper_at(self, site: str) -> str | None:
        """Return the keeper of the first member of a site that lives."""
        living = self._living()
        here = (keeper for member, keeper in self._keepers.items() if member in living and wire.site_of(member) == site)
        return next(here, None)
