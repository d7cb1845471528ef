"""Samples under way: asks the replicas for stretches as the dispatch says, and puts samples together from them.

A stretch depends on its seed, which names the sample and the tokens before it, and not on who draws it. A replica that
fails gets no more; its stretches are drawn elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hetrl.dispatch import Begun, Dispatch, Key
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.stretches import BEFORE, Drawn, Request, Stretch, joined, stretch_of
from hetrl.runtime.rl.timeline import Timeline
from hetrl.runtime.rl.under_way import is_complete
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.workload import ACTOR_GENERATION

TICK_SECONDS = 1.0
RESTS, MOST_REST_SECONDS = 4.0, 0.1  # times as long as a choice took, before the next one, and never longer
MOST_FAILURES = 3  # of replicas at one stretch: then it is to blame
log = logging.getLogger(__name__)


@dataclass
class _Open:
    """A sample that is not complete; `failed` are the replicas that failed at its next stretch."""

    request: Request
    result: asyncio.Future[Drawn]
    so_far: wire.Sample
    stretches: list[Stretch] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)

    def fail(self, error: BaseException) -> None:
        """Raise an error where the sample is waited for, if it still is."""
        if not self.result.done():
            self.result.set_exception(error)


class Draws:
    """Draws samples at the replicas of a dispatch; `on_lost` hears who failed and how.

    `clock` stands still while generation does: who waits for its turn is neither slow nor late.
    """

    def __init__(
        self,
        member: Member,
        dispatch: Dispatch,
        on_lost: Callable[[str, HetrlError], None],
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member, self._dispatch, self._on_lost, self._timeline = member, dispatch, on_lost, timeline
        self._prompts, self._numbers = itertools.count(), itertools.count()
        self._open: dict[Key, _Open] = {}
        self._groups: dict[int, Sequence[_Open]] = {}
        self._asked: dict[Begun, tuple[asyncio.Task[None], int]] = {}
        self._farewells: set[asyncio.Task[None]] = set()
        self._missed: set[str] = set()  # replicas without the newest weights
        self._none_left: HetrlError | None = None  # what the last replica was lost by, if all ever were
        self._changed = asyncio.Event()
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._choice: asyncio.Handle | None = None  # that is to be made
        self._rested = 0.0  # by the loop's clock: when the next one may be

    @property
    def replicas(self) -> tuple[str, ...]:
        """Return those that are not lost."""
        return self._dispatch.replicas

    @property
    def under_way(self) -> dict[int, tuple[wire.Sample, ...]]:
        """Return what the samples of each group have that has a number, and was not forgotten."""
        return {number: tuple(one.so_far for one in group) for number, group in self._groups.items()}

    def forget(self, number: int) -> None:
        """Keep the samples of a group no longer."""
        self._groups.pop(number, None)

    async def group(self, requests: Sequence[Request], batch: int, number: int | None = None) -> tuple[Drawn, ...]:
        """Return the samples of one prompt; those of a lower batch go first.

        With a `number` what it has is found under that (`under_way`) until it is forgotten. Raises HetrlError when no
        replica is left, or several failed at the same stretch, and RunAborted.
        """
        if self._none_left is not None and not self._dispatch.replicas:
            raise self._none_left
        loop, prompt = asyncio.get_running_loop(), next(self._prompts)
        opened = {(prompt, k): _Open(one, loop.create_future(), one.have) for k, one in enumerate(requests)}
        self._open |= opened
        if number is not None:
            self._groups[number] = tuple(opened.values())
        self._dispatch.add(prompt, batch, len(requests))
        try:
            for key, one in opened.items():
                self._take_over(key, one, loop.time())
            self._go_on()
            if self._timer is None:
                self._tick()
            return tuple(await asyncio.gather(*(one.result for one in opened.values())))
        finally:
            for key in opened:
                self._open.pop(key, None)
            self._withdraw(self._dispatch.drop(prompt))

    def _take_over(self, key: Key, one: _Open, now: float) -> None:
        """Go on behind what a sample has from before."""
        if not one.so_far.tokens:
            return
        one.stretches.append(Stretch(BEFORE, len(one.so_far.tokens), now, now))
        complete = is_complete(one.so_far, one.request.max_tokens)
        self._dispatch.has(key, len(one.so_far.tokens), complete=complete)
        if complete:
            del self._open[key]
            one.result.set_result(Drawn(one.so_far, tuple(one.stretches)))

    def lost(self, name: str, error: HetrlError) -> None:
        """Give a replica up; what it was asked for is drawn elsewhere."""
        if name in self._dispatch.replicas:
            log.warning("%s is lost, its samples are drawn elsewhere: %s", name, error)
            self._withdraw(self._dispatch.lost(name))
            self._on_lost(name, error)
        if not self._dispatch.replicas:
            self._none_left = HetrlError(f"no replica is left to draw samples; the last one: {error}")
            self._fail(self._none_left)
            return
        self._go_on()

    def begin_without(self, name: str) -> None:
        """Draw nothing at a replica until it is there (`back`)."""
        self._dispatch.lost(name)

    def back(self, name: str) -> None:
        """Let a replica draw that was started anew, or came late, once it has the newest weights (`behind`).

        What it was asked for before is drawn elsewhere, or by itself.
        """
        if name in self._dispatch.replicas:
            self._withdraw(self._dispatch.lost(name))
        self._dispatch.back(name)
        self.missed(name)

    # ---- replicas behind a link that is out, or started anew

    def served(self, name: str) -> None:
        """Let a replica draw: it has the newest weights."""
        if name in self._missed:
            self._missed.discard(name)
            self.link_changed(wire.site_of(name))

    def missed(self, name: str) -> None:
        """Let a replica draw nothing: newer weights than it has were published."""
        self._missed.add(name)
        self.link_changed(wire.site_of(name))

    def link_changed(self, site: str) -> None:
        """Let the replicas of a site rest, whose samples are drawn elsewhere, or go on."""
        for name in self._dispatch.replicas:
            if wire.site_of(name) == site:
                rests = name in self._missed or self._member.links.are_out(name)
                (self._dispatch.pause if rests else self._dispatch.resume)(name)
        self._changed.set()
        self._go_on()

    @property
    def behind(self) -> tuple[str, ...]:
        """Return the replicas that missed weights and can be reached again."""
        return tuple(name for name in self.replicas if name in self._missed and not self._member.links.are_out(name))

    @property
    def in_step(self) -> tuple[str, ...]:
        """Return the replicas that missed no weights."""
        return tuple(name for name in self.replicas if name not in self._missed)

    async def changed(self) -> None:
        """Wait until a replica is behind, or not any more, or a link is out or back."""
        self._changed.clear()
        await self._changed.wait()

    # ---- stretches

    def _go_on(self) -> None:
        """Let every replica that has room begin what it takes, once for all that came to pass since the last choice.

        A choice looks at all replicas and what they draw. With thousands of samples it takes some milliseconds, and is
        not made for each of them.
        """
        if self._choice is None:
            self._choice = asyncio.get_running_loop().call_at(self._rested, self._choose)

    def _choose(self) -> None:
        loop, self._choice = asyncio.get_running_loop(), None
        began = loop.time()
        try:
            self._begin(self._dispatch.next(self._clock()))
        except Exception as defect:  # it is raised where the samples are waited for
            self._fail(defect)
        self._rested = loop.time() + min(RESTS * (loop.time() - began), MOST_REST_SECONDS)

    def _begin(self, begun: Sequence[Begun]) -> None:
        for name, key in begun:
            number = next(self._numbers)
            task = asyncio.ensure_future(self._ask(name, key, number))
            task.add_done_callback(self._ended)
            self._asked[name, key] = task, number

    async def _ask(self, name: str, key: Key, number: int) -> None:
        """Ask a replica for the next stretch of a sample, and take what it says."""
        loop, doing = asyncio.get_running_loop(), self._open[key].request.doing
        sent, since, request = loop.time(), self._clock(), self._next(self._open[key], number)
        error: HetrlError | None = None
        try:
            with self._timeline.of(ACTOR_GENERATION):
                reply = await self._member.request(name, request, timeout_seconds=wire.WORK_SECONDS, doing=doing)
            part, seconds = stretch_of(reply.message, request.sampling.max_tokens, f"{name} ({doing})")
            seconds = min(seconds, self._clock() - since)  # without the time in which generation stood still
        except HetrlError as failure:
            error = failure
        del self._asked[name, key]  # not where it was cancelled: who does that has seen to it
        if isinstance(error, RunAborted):
            self._fail(error)
        elif error is not None:
            self._failed(name, key, error)
        else:
            self._take(name, key, part, Stretch(name, len(part.tokens), sent, loop.time()), seconds)
        self._go_on()

    def _next(self, one: _Open, number: int) -> wire.Generate:
        have = len(one.so_far.tokens)
        sampling = wire.Sampling(
            samples=1,
            max_tokens=min(self._dispatch.stretch, one.request.max_tokens - have),
            temperature=one.request.temperature,
            top_p=1.0,
            seed=one.request.seed(have),
            stop_tokens=one.request.stop_tokens,
        )
        prompt, versions = (*one.request.prompt, *one.so_far.tokens), one.so_far.versions
        since = versions[0].version if versions else None
        return wire.Generate(draw=number, prompt=prompt, sampling=sampling, since=since)

    def _take(self, name: str, key: Key, part: wire.Sample, stretch: Stretch, seconds: float) -> None:
        one = self._open[key]
        one.so_far = joined(one.so_far, part)
        one.stretches.append(stretch)
        one.failed.clear()
        complete = is_complete(one.so_far, one.request.max_tokens)
        self._withdraw(self._dispatch.advanced(name, key, len(part.tokens), seconds, complete=complete))
        if complete:
            del self._open[key]
            if not one.result.done():  # the run may have failed in this very moment
                one.result.set_result(Drawn(one.so_far, tuple(one.stretches)))

    def _failed(self, name: str, key: Key, error: HetrlError) -> None:
        one = self._open[key]
        one.failed.add(name)
        if len(one.failed) >= MOST_FAILURES:
            one.fail(error)
        self.lost(name, error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A defect is raised where the samples are waited for."""
        if not task.cancelled() and (defect := task.exception()) is not None:
            self._fail(defect)

    def _fail(self, error: BaseException) -> None:
        for one in self._open.values():
            one.fail(error)

    def _withdraw(self, in_vain: Sequence[Begun]) -> None:
        """Tell replicas that nobody wants what they draw."""
        for name, key in in_vain:
            if (name, key) not in self._asked:  # it ended with the run
                continue
            task, number = self._asked.pop((name, key))
            task.cancel()
            farewell = asyncio.ensure_future(self._tell(name, wire.Withdraw(draw=number)))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def _tell(self, name: str, message: wire.Message) -> None:
        with suppress(HetrlError):  # whoever cannot be told is noticed by who waits for it
            await self._member.send(name, message)

    def _tick(self) -> None:
        """Look now and then for stretches that hang, while there are any."""
        self._timer = None
        if self._open:
            self._begin(self._dispatch.late(self._clock()))
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)
