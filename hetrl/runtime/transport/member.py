"""A member of a run: sends, receives, asks and answers, all through the gateway of its site.

What a member sends to another arrives once and in order, per receiver and priority (`wire.priority_of`), whatever is
lost on the way: `exchange` numbers, acknowledges and repeats; here are its sockets and its clock.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hetrl.errors import HetrlError, error_of
from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import MESSAGE_BYTES, MOST_FRAMES, Buffer, bytes_of
from hetrl.runtime.transport.connection import Connection
from hetrl.runtime.transport.exchange import Exchange
from hetrl.runtime.transport.farewell import farewell
from hetrl.runtime.transport.heartbeat import BEAT_SECONDS, beat, silence
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.mailbox import DeadlineError, Envelope, Mailbox, RunAborted
from hetrl.runtime.transport.offences import Offences
from hetrl.runtime.transport.receiver import Receiver
from hetrl.runtime.wire import NO_ANSWER, gateway_of
from hetrl.runtime.wire.authority import Authority, OfTheTable
from hetrl.runtime.wire.keys import SiteKeys

__all__ = ["DeadlineError", "Envelope", "Member", "RunAborted"]

SEND_SECONDS = 600.0
HELLO_SECONDS = 5.0  # a hello brings this member's counters to the gateway
ASK_AFTER_SECONDS = 5.0  # a member that answers nothing for so long may be another process by now
ASK_GATEWAY_SECONDS = 2.0  # what a gateway is asked is outside the channels and may get lost
_TICK_SECONDS = 0.2  # finer than the shortest stall after which a channel asks what arrived
_IDLE_TICK_SECONDS = 1.0  # with nothing under way: a thousand members that wait are not to keep their processes busy


class Member:
    """One address of a run, connected to its gateway between `async with` and its end.

    The gateway may come up later, or go and come back: what is sent meanwhile waits.
    """

    def __init__(
        self,
        address: str,
        run: str,
        gateway: str,
        keys: SiteKeys,
        directory: Path | None = None,
        authority: Authority | None = None,
    ) -> None:
        """Name the member `address` of `run`; `gateway` is the endpoint of its own site's gateway.

        In `directory` that gateway may have a unix socket, which is taken where both are on one node. What is taken
        from whom says `authority`, else the table.
        """
        if wire.site_of(address) != keys.site:
            raise HetrlError(f"{address}: the keys are those of site {keys.site}; give the keys of its own site")
        self.address = address
        self._run, self._gateway, self._keys, self._directory = run, gateway, keys, directory
        # Unique across restarts of the same address, so that a late reply finds no wrong request.
        self._ids = itertools.count(time.time_ns() // 1000)
        self._moved = asyncio.Event()
        self._mailbox = Mailbox(address, run, lambda arrival: self._receiver.take(arrival))
        self._exchange = Exchange(
            address,
            run,
            secrets.randbits(62),  # tells this life of the address from every other one
            lambda header, frames: self._connection.send(header, frames),
            self._mailbox.lose,
            lambda source, error: self._offences.add(source, error),
        )
        self._offences = Offences(address, self._cut_off)
        self._authority = authority or OfTheTable()
        self.links = Links()
        self._receiver = Receiver(
            self._exchange, self._mailbox, self._authority, self._offences, self.links, self._moved.set
        )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def offences(self) -> Mapping[str, int]:
        """Return how many messages of each other member were refused."""
        return self._offences.counts

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(
            self._gateway, self._directory, self._keys, self._receiver.hear, self._connected, self._failed
        )
        self._start(self._tick(), "clock")
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        whole = kind is None and not self._mailbox.ended
        self.finish(HetrlError(f"{self.address}: the member is closed"))
        await farewell(self._exchange, self.links, whole)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._connection.close().term)

    async def send(
        self,
        to: str | Sequence[str],
        message: wire.Message,
        buffers: Sequence[Buffer] = (),
        *,
        reply_to: int | None = None,
    ) -> int:
        """Send to one or more members and return the message's id; waits while a receiver has too much to take.

        Buffers are not copied: they must not change until the receiver has answered.
        Raises RunAborted, or DeadlineError when a receiver takes nothing for `SEND_SECONDS`; while a link there is out
        the clock stands still, here as in a request.
        """
        receivers = (to,) if isinstance(to, str) else tuple(dict.fromkeys(to))
        message_id = next(self._ids)
        await self._transmit(message_id, receivers, message, buffers, reply_to)
        return message_id

    async def receive(self, timeout_seconds: float | None = None) -> Envelope:
        """Return the next message that is not a reply (an Undeliverable of a plain `send` counts as none).

        Raises RunAborted, or DeadlineError after `timeout_seconds`; None waits for as long as the run lasts.
        """
        return await self._mailbox.take(timeout_seconds)

    @property
    def has_mail(self) -> bool:
        """Whether `receive` returns at once."""
        return not self._mailbox.empty

    async def request(
        self, to: str, message: wire.Message, buffers: Sequence[Buffer] = (), *, timeout_seconds: float, doing: str
    ) -> Envelope:
        """Send and return the reply; `doing` says what for, as in "step 12: generate group 3".

        Raises HetrlError naming the peer, its site and `doing` when the peer failed, gave what is no answer to this, or
        could not be reached, DeadlineError when it did not answer within `timeout_seconds`, RunAborted when the run
        ended.
        """
        if cause := self._offences.cause(to):
            raise HetrlError(f"{cause} ({doing})")
        message_id = next(self._ids)
        reply = self._mailbox.expect(message_id, to)
        try:
            async with self.links.timeout((to,), timeout_seconds):
                await self._transmit(message_id, (to,), message, buffers, None)
                while wire.is_gateway(to) and not (await asyncio.wait([reply], timeout=ASK_GATEWAY_SECONDS))[0]:
                    self._exchange.tell(to, message, id=message_id)
                envelope = await reply
        except TimeoutError:
            raise DeadlineError(
                f"{wire.site_of(to)}: {to} did not answer {self.address} within {timeout_seconds:g} s ({doing}); "
                f"look into the log of {to}"
            ) from None
        finally:
            self._mailbox.dismiss(message_id)
        if envelope is None:
            raise self._mailbox.ending()
        match envelope.message:
            case wire.Failed(cause=cause, exit_code=exit_code):
                raise error_of(exit_code, f"{to} failed ({doing}): {cause}")
            case wire.Undeliverable(cause=cause):
                raise HetrlError(f"{wire.site_of(to)}: {to} cannot be reached ({doing}): {cause}")
        if not self._authority.answers(type(message), envelope.message):
            raise HetrlError(f"{to} answered {type(message).__name__} with {type(envelope.message).__name__} ({doing})")
        return envelope

    async def reply(self, envelope: Envelope, message: wire.Message, buffers: Sequence[Buffer] = ()) -> None:
        """Answer the message that `envelope` holds."""
        await self.send(envelope.header.source, message, buffers, reply_to=envelope.header.id)

    def start_heartbeat(
        self, to: Callable[[], Iterable[str]], every_seconds: float = BEAT_SECONDS, doing: Callable[[], str] = str
    ) -> None:
        """Tell whoever `to` names then, every so often, that this member lives, and what it is `doing`.

        And, at once, that Slurm ends the job of its site soon, when the job's script has said so (`notice`).
        """
        self._start(beat(self._exchange, self._directory, to, every_seconds, doing), "heartbeat")

    def expect_word_of(self, source: str, within_seconds: float, first_seconds: float) -> None:
        """End, as the run's abort does, when nothing came of `source` for so long; its first word may take longer."""
        self._start(self._listen(source, within_seconds, first_seconds), "listening")

    def finish(self, end: HetrlError) -> None:
        """Make every pending and later call raise `end`."""
        self._mailbox.finish(end)
        self._moved.set()

    def offended(self, source: str, what: str) -> None:
        """Count what another member should not have said; after several times nothing of it is heard any more."""
        self._offences.add(source, what)

    def open_bytes(self, address: str, priority: wire.Priority) -> int:
        """Return the bytes of messages in a channel that a member has not taken out, of `WINDOW_BYTES` at most."""
        return self._exchange.open_bytes(address, priority)

    def abandon(self, address: str, priority: wire.Priority, cause: str) -> None:
        """Drop what is under way to a member in one channel; requests to it fail with the cause."""
        self._exchange.abandon(address, priority, cause, self._loop.time())
        self._moved.set()

    def _cut_off(self, address: str, cause: str) -> None:
        """Give up a member of which nothing is heard any more."""
        self._exchange.forget(address, cause)
        self._moved.set()

    # ---- sending

    async def _transmit(
        self,
        message_id: int,
        receivers: tuple[str, ...],
        message: wire.Message,
        buffers: Sequence[Buffer],
        reply_to: int | None,
    ) -> None:
        """Wait for room and give a message to the channels of its receivers."""
        self._mailbox.check()
        if not receivers:
            raise HetrlError(f"{self.address}: {type(message).__name__} has no receiver")
        if wire.is_gateway(receivers[0]):
            self._exchange.tell(receivers[0], message, id=message_id, reply_to=reply_to)
            return
        frames = [wire.encode_struct(message), *buffers]
        if (size_bytes := bytes_of(frames)) > MESSAGE_BYTES:
            raise HetrlError(
                f"{self.address}: {type(message).__name__} has {size_bytes} bytes, at most {MESSAGE_BYTES} may go "
                "at once; cut it"
            )
        if len(frames[0]) > wire.STRUCT_BYTES or len(frames) > MOST_FRAMES:
            raise HetrlError(
                f"{self.address}: {type(message).__name__} has {len(frames[0])} bytes of its own and {len(frames) - 1} "
                f"buffers, at most {wire.STRUCT_BYTES} and {MOST_FRAMES - 1} may go at once; cut it"
            )
        priority = wire.priority_of(message)
        shipment = self._exchange.ship(message_id, receivers, priority, reply_to, frames, self._loop.time())
        try:
            async with self.links.timeout(receivers, SEND_SECONDS):
                while not shipment.posted:
                    self._moved.clear()
                    await self._moved.wait()
                    self._mailbox.check()
        except TimeoutError:
            stuck = self._exchange.stuck(shipment)
            raise DeadlineError(
                f"{', '.join(stuck)} took nothing from {self.address} for {SEND_SECONDS:g} s "
                f"({type(message).__name__}); look into its log",
                stuck,
            ) from None
        finally:
            if not shipment.posted:
                self._exchange.withdraw(shipment, self._loop.time())

    def _connected(self, lost: bool) -> None:
        """Say whose the connections are, and ask at once for what may have been lost with one before."""
        self._greet()
        if lost:
            self.links.forget()  # a gateway that was started again has no link that is out, and says so of none
            self._exchange.hasten(self._loop.time())

    def _greet(self) -> None:
        header = wire.Header(run=self._run, source=self.address, to=(gateway_of(self._keys.site),), id=NO_ANSWER)
        self._connection.greet(
            header,
            chunks_resent=self._exchange.chunks_resent,
            chunks_duplicate=self._exchange.chunks_duplicate,
            offences=self._offences.counts,
        )

    # ---- time and the end

    async def _listen(self, source: str, within_seconds: float, first_seconds: float) -> None:
        self.finish(await silence(self.address, self._receiver, source, within_seconds, first_seconds))

    async def _tick(self) -> None:
        greeted = asked = self._loop.time()
        while True:
            await asyncio.sleep(_TICK_SECONDS if self._exchange.busy else _IDLE_TICK_SECONDS)
            now = self._loop.time()
            self._exchange.tick(now)
            if now - asked > ASK_AFTER_SECONDS:
                asked = now
                self._exchange.ask_after(self._mailbox.awaited(), now, ASK_AFTER_SECONDS)
            self._moved.set()
            self._connection.pump()
            if now - greeted > HELLO_SECONDS:
                greeted = now
                self._greet()

    def _start(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"{self.address} {name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a defect; nobody may wait for it in vain."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _failed(self, defect: BaseException) -> None:
        self.finish(HetrlError(f"{self.address} stopped: {defect!r}"))
