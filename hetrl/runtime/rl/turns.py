"""Whose turn it is on devices that the tasks of a group share; who has none frees what the plan's idle states say.

    start:       task by task: Wake (it builds its engine), Sleep
    generation:  runs whenever nobody else of its group has work; it is stopped in the middle of a response
    the others:  one after the other; who has had its turn of a batch sleeps at once, for the next turn is another's,
                 which then does not wait for the states that leave

Tasks that are alone on their devices have them all the time. A group takes all tasks of a batch before those of the
next one, its inferences before its trainings, as the play of a plan does (`hetrl.simulator`), and between the first and
the last of them generation does not run there: each time would cost it its keys and values.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from hetrl.runtime import wire
from hetrl.runtime.rl.timeline import Timeline
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.stopwatch import Stopwatch
from hetrl.workload import ACTOR_GENERATION, INFERENCES, TASKS, TRAININGS


@dataclass(frozen=True)
class Party:
    """A task that takes turns: the addresses of its members, and what it keeps on its devices while it waits."""

    addresses: tuple[str, ...]
    idle_state: str


@dataclass
class _Group:
    """A group in its state: who is awake, how many prompts want generation, and whether it may run.

    `batch` is the number of the batch whose tasks have the devices, `left` those that have not had them yet; so many
    tasks of later batches are `queued`.
    """

    parties: Mapping[str, Party]
    batch: int = 1
    left: set[str] = field(init=False)
    queued: int = 0
    awake: str | None = None
    prompts: int = 0
    resting: asyncio.Task[None] | None = None  # whoever had the last turn goes to sleep
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    passed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def __post_init__(self) -> None:
        self.expect_all()

    def awaited_by(self, task: str) -> set[str]:
        """Return the tasks that are yet to have the devices for the batch before this one has them."""
        return self.left.intersection(INFERENCES if task in TRAININGS else ())

    def expect_all(self) -> None:
        """Note that no task has had the devices for the batch."""
        self.left = {*self.parties} - {ACTOR_GENERATION}


class Turns:
    """Gives the devices of shared groups to one task at a time."""

    def __init__(self, member: Member, groups: Sequence[Mapping[str, Party]], *, new_weights: bool) -> None:
        """Speak through `member`; `new_weights`: generation never continues with those that it slept with."""
        self._member, self._new_weights = member, new_weights
        self._groups = [_Group(parties) for parties in groups]
        self._of = {name: group for group in self._groups for name in group.parties}
        self._forgotten: set[str] = set()
        self._asked: dict[str, asyncio.Future[Envelope]] = {}
        self.timeline = Timeline()
        self.seconds = 0.0  # what all changes took so far
        self._awake = Stopwatch(time.monotonic)  # goes while generation is
        for group in self._groups:
            group.open.set()

    def begin_with(self, batch: int) -> None:
        """Expect the tasks of this batch first, as after the steps of an earlier run."""
        for group in self._groups:
            group.batch = batch

    async def start(self, seen: Callable[[str], Awaitable[None]], timeout_seconds: float) -> None:
        """Let every task of a shared group start and go to sleep, one after the other; `seen` waits for a member."""

        async def start(group: _Group) -> None:
            for name in sorted(group.parties, key=TASKS.index):
                await asyncio.gather(*(seen(address) for address in group.parties[name].addresses))
                await self._tell(group, name, wire.Wake(), timeout_seconds)
                group.awake = name
                await self._give(group, None)

        await asyncio.gather(*(start(group) for group in self._groups))

    def generating(self) -> float:
        """Return the seconds of a clock that stands still while generation does."""
        return self._awake.seconds

    def forget(self, address: str) -> None:
        """Tell a member nothing any more, and wait for it no longer: it is lost."""
        self._forgotten.add(address)
        if (asked := self._asked.get(address)) is not None:
            asked.cancel()

    @asynccontextmanager
    async def of(self, task: str, batch: int | None = None) -> AsyncIterator[None]:
        """Have the devices of a task once for a batch, numbered from 1; without one, for what belongs to none.

        Each task of a group has them once for every batch, a training once those of the group that infer have had them;
        what belongs to none comes before the first.
        """
        group = self._of.get(task)
        if group is None:
            yield
            return
        if batch is not None:
            group.queued += 1
            try:
                async with group.passed:
                    await group.passed.wait_for(lambda: group.batch == batch and not group.awaited_by(task))
            finally:
                group.queued -= 1
        group.open.clear()
        async with group.lock:
            await self._give(group, task)
            yield
        if batch is not None:
            group.left.discard(task)
            async with group.passed:
                group.passed.notify_all()
        if batch is None or not group.left:
            await self._leave(group, batch)
        if batch is not None and not group.queued:  # else they are next at once
            group.resting = asyncio.create_task(self._rest(group, task))

    async def _rest(self, group: _Group, task: str) -> None:
        """Let who had its turn sleep, unless another one was woken since."""
        async with group.lock:
            if group.awake == task:
                await self._give(group, None)

    async def settled(self) -> None:
        """Wait until nobody is on the way to sleep; raise what failed there."""
        for group in self._groups:
            if group.resting is not None:
                await group.resting

    async def _leave(self, group: _Group, batch: int | None) -> None:
        """Let generation, and the tasks of the next batch, have the devices."""
        group.open.set()
        if batch is not None:
            async with group.passed:
                group.batch += 1
                group.expect_all()
                group.passed.notify_all()
        if group.queued:  # it would be stopped at once; they let it on when they leave
            return
        async with group.lock:
            if group.prompts and group.open.is_set():
                await self._give(group, ACTOR_GENERATION)

    @asynccontextmanager
    async def prompt(self) -> AsyncIterator[None]:
        """Have generation on its devices when a prompt is sent there; until the end it is woken again after others."""
        group = self._of.get(ACTOR_GENERATION)
        if group is None:
            yield
            return
        group.prompts += 1
        try:
            await self._generate(group)
            yield
        finally:
            group.prompts -= 1

    async def _generate(self, group: _Group) -> None:
        while group.awake != ACTOR_GENERATION:
            await group.open.wait()
            async with group.lock:
                if group.open.is_set():
                    await self._give(group, ACTOR_GENERATION)

    async def _give(self, group: _Group, task: str | None) -> None:
        """Let who is awake sleep and wake a task; nothing happens where it is awake."""
        if group.resting is not None and group.resting.done():
            group.resting.result()  # raises what failed
        changes = task or group.awake
        if group.awake == task or changes is None:
            return
        start = time.monotonic()
        with self.timeline.of(changes):
            await self._change(group, task)
        self.seconds += time.monotonic() - start

    async def _change(self, group: _Group, task: str | None) -> None:
        if group.awake is not None:
            party = group.parties[group.awake]
            keep = group.awake != ACTOR_GENERATION or not self._new_weights
            sleeper, group.awake = group.awake, None
            await self._tell(group, sleeper, wire.Sleep(idle_state=party.idle_state, keep_weights=keep))
            if sleeper == ACTOR_GENERATION:
                self._awake.stop()
        if task is not None:
            await self._tell(group, task, wire.Wake())
            group.awake = task
            if task == ACTOR_GENERATION:
                self._awake.go_on()

    async def _tell(
        self, group: _Group, task: str, message: wire.Message, timeout_seconds: float = wire.WORK_SECONDS
    ) -> None:
        """Send to all members of a task and wait for all; raises what `Member.request` does."""
        doing = f"{task}: {type(message).__name__.lower()}"

        async def ask(to: str) -> None:
            request = self._member.request(to, message, timeout_seconds=timeout_seconds, doing=doing)
            self._asked[to] = asked = asyncio.ensure_future(request)
            try:
                await asked
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if to not in self._forgotten or this is None or this.cancelling():
                    raise
            finally:
                del self._asked[to]

        await asyncio.gather(*(ask(to) for to in group.parties[task].addresses if to not in self._forgotten))
