"""What arrived at a member: messages in order for `receive`, replies for the requests that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Arrival


class RunAborted(HetrlError):  # noqa: N818 - it says what happened to the run
    """The run ended for the cause that the message carries."""

    exit_code = 8
    travels = False


class DeadlineError(HetrlError):
    """Nobody answered, sent or took anything in time; the message says who and who waited.

    `stuck` are the receivers that had no room for what was to be sent, which then went to none.
    """

    def __init__(self, message: str, stuck: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.stuck = stuck


@dataclass(frozen=True)
class Envelope:
    """A message as it arrived; the buffers are read-only views."""

    header: wire.Header
    message: wire.Message
    buffers: tuple[memoryview, ...]


class Mailbox:
    """The inbox and the waiting requests of the member `address`; `taken` is told of what its application took out."""

    def __init__(self, address: str, run: str, taken: Callable[[Arrival], None]) -> None:
        self._address, self._run, self._taken = address, run, taken
        self._waiting: dict[int, tuple[str, asyncio.Future[Envelope | None]]] = {}
        self._inbox: asyncio.Queue[tuple[Envelope, Arrival | None] | None] = asyncio.Queue()
        self._end: HetrlError | None = None

    def put(self, envelope: Envelope, arrival: Arrival | None) -> bool:
        """Give a message to whoever waits for it; False where it answers a request that nobody waits for any more."""
        answered = envelope.header.reply_to
        if answered is None:
            self._inbox.put_nowait((envelope, arrival))
            return True
        if arrival is not None:
            self._taken(arrival)
        if answered not in self._waiting:
            return False
        _, reply = self._waiting[answered]
        if not reply.done():
            reply.set_result(envelope)
        return True

    async def take(self, timeout_seconds: float | None) -> Envelope:
        """Return the next message that is no reply; raises DeadlineError, or why the member ended."""
        self.check()
        try:
            async with asyncio.timeout(timeout_seconds):
                item = await self._inbox.get()
        except TimeoutError:
            raise DeadlineError(f"{self._address}: no message arrived within {timeout_seconds:g} s") from None
        if item is None:
            self._inbox.put_nowait(None)
            raise self.ending()
        envelope, arrival = item
        if arrival is not None:
            self._taken(arrival)
        return envelope

    def expect(self, message: int, to: str) -> asyncio.Future[Envelope | None]:
        """Wait for the reply to a request to `to`; the result is None when the member ends."""
        reply: asyncio.Future[Envelope | None] = asyncio.get_running_loop().create_future()
        self._waiting[message] = (to, reply)
        return reply

    def dismiss(self, message: int) -> None:
        """Wait no longer."""
        del self._waiting[message]

    def asked(self, message: int | None) -> str | None:
        """Return whom a request that waits went to."""
        return self._waiting[message][0] if message in self._waiting else None

    def awaited(self) -> dict[str, int]:
        """Return whose answers requests wait for, each with the newest of these requests."""
        return {to: message for message, (to, _) in self._waiting.items()}

    def lose(self, receiver: str, messages: tuple[int, ...], cause: str) -> None:
        """Fail every request to a receiver, and tell of plain messages that were under way to it, as a gateway does."""

        def undeliverable(message: int) -> Envelope:
            source, to = wire.gateway_of(wire.site_of(self._address)), (self._address,)
            header = wire.Header(run=self._run, source=source, to=to, id=wire.NO_ANSWER, reply_to=message)
            return Envelope(header, wire.Undeliverable(receiver=receiver, cause=cause), ())

        for message, (to, reply) in list(self._waiting.items()):
            if to == receiver and not reply.done():
                reply.set_result(undeliverable(message))
        for message in messages:
            if message not in self._waiting:
                self._inbox.put_nowait((undeliverable(message), None))

    def finish(self, end: HetrlError) -> None:
        """Make every waiting and later call raise `end`."""
        self._end = self._end or end
        self._inbox.put_nowait(None)
        for _, reply in self._waiting.values():
            if not reply.done():
                reply.set_result(None)

    @property
    def empty(self) -> bool:
        """Whether `take` would wait."""
        return self._inbox.empty()

    @property
    def ended(self) -> bool:
        """Whether every call raises why nothing works any more."""
        return self._end is not None

    def check(self) -> None:
        """Raise why nothing works any more, if so."""
        if self._end is not None:
            raise self.ending()

    def ending(self) -> HetrlError:
        """Return why nothing works any more, as an exception of its own for each caller."""
        return type(self._end)(str(self._end)) if self._end else HetrlError(f"{self._address}: the member is closed")
