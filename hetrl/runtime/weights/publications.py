"""The versions that a trainer publishes, one after another: taken in its turn, sent beside what it does next.

Publish         the one before is sent to its end; the weights leave the devices; Exported; they go on their way
FinishPublish   Published, once all receivers have said what came of it
CatchUp         members that are behind get the newest version, beside all of that; Published, once they have it
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Set

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.latecomers import Latecomers
from hetrl.runtime.weights.publisher import Publisher


async def _at_once() -> None:
    """Take no time."""


class Publications:
    """What a trainer publishes, and the version that it keeps of it."""

    def __init__(self, member: Member) -> None:
        self._member, self._kept = member, Kept()
        self._sending: asyncio.Task[wire.Published] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._version: int | None = None  # that is sent, or was last
        self._to = frozenset[str]()

    async def begin(
        self,
        request: wire.Publish,
        export: Callable[[Publisher], Awaitable[None]],
        beside: Callable[[], Awaitable[None]] = _at_once,
    ) -> wire.Exported:
        """Begin to send a version; `export` lets the publisher take the weights, but for a version that is kept.

        `beside` is waited for before the version counts as sent. Raises what `export` raises.
        """
        if self._sending is not None:
            await asyncio.wait([self._sending])  # it is sent from what this one replaces
        publisher = Publisher(self._member, request, self._kept)
        self._version, self._to = request.version, frozenset(request.receivers)
        self._sending = asyncio.create_task(_send(publisher, beside))
        if self._kept.version == request.version:
            publisher.take_kept()
        else:
            try:
                await export(publisher)
            except BaseException:
                self._sending.cancel()
                raise
        return wire.Exported(version=request.version)

    def finish(self, envelope: Envelope, message: wire.FinishPublish) -> None:
        """Answer, once it is known, what came of a version; raises HetrlError where it is not the last one."""
        if self._sending is None or message.version != self._version:
            raise HetrlError(f"version {message.version} is not being published; the last one is {self._version}")
        self._answer(envelope, asyncio.shield(self._sending))

    def catch_up(self, envelope: Envelope, message: wire.CatchUp) -> None:
        """Bring members that are behind to the newest version, and answer then."""
        self._answer(envelope, self._bring(Latecomers(self._member, message, self._kept), {*message.receivers}))

    def forget(self) -> None:
        """Keep no version: the weights become others under a number that they may have had."""
        self._kept.forget()

    async def close(self) -> None:
        """Give up what is under way."""
        under_way: list[asyncio.Task[wire.Published] | asyncio.Task[None]] = [*self._answers]
        if self._sending is not None:
            under_way.append(self._sending)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _bring(self, latecomers: Latecomers, names: Set[str]) -> wire.Published:
        while self._sending is not None and not self._sending.done() and self._to & names:
            await asyncio.wait([self._sending])  # one thing at a time to each of them
        return await latecomers.bring()

    def _answer(self, envelope: Envelope, outcome: Awaitable[wire.Published]) -> None:
        answer = asyncio.create_task(self._tell(envelope, outcome))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    async def _tell(self, envelope: Envelope, outcome: Awaitable[wire.Published]) -> None:
        try:
            answer: wire.Message = await outcome
        except HetrlError as error:
            answer = wire.Failed(cause=str(error), exit_code=error.exit_code)
        await self._member.reply(envelope, answer)


async def _send(publisher: Publisher, beside: Callable[[], Awaitable[None]]) -> wire.Published:
    with publisher.leaving_out():
        await asyncio.gather(publisher.send(), beside())
        return await publisher.finish()
