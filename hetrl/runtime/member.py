"""A member of a run: sends, receives, asks and answers, all through the gateway of its site.

A message with buffers counts as under way until its receiver took it out (`Window`); the receiver says so with a
`Received` whose `reply_to` is the id of the message. Messages without buffers are small and go at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from hetrl.errors import HetrlError, error_of
from hetrl.runtime import wire
from hetrl.runtime.keys import SiteKeys
from hetrl.runtime.sockets import LINGER_SECONDS, NO_ANSWER, client_socket, gateway_of, sizes
from hetrl.runtime.window import Window

WINDOW_BYTES = 64 * 2**20  # 10 Gb/s over a round trip of 50 ms
SEND_SECONDS = 600.0

_log = logging.getLogger(__name__)


class RunAborted(HetrlError):  # noqa: N818 - it says what happened to the run
    """The run ended for the cause that the message carries."""


class DeadlineError(HetrlError):
    """Nobody answered, sent or took anything in time; the message says who and who waited."""


@dataclass(frozen=True)
class Envelope:
    """A message as it arrived; the buffers are read-only views of what came off the wire."""

    header: wire.Header
    message: wire.Message
    buffers: tuple[memoryview, ...]


class Member:
    """One address of a run, connected to its gateway between `async with` and its end.

    The gateway may come up later, or go and come back: what is sent meanwhile waits.
    """

    def __init__(self, address: str, run: str, gateway: str, keys: SiteKeys) -> None:
        """Name the member `address` of `run`; `gateway` is the endpoint of its own site's gateway."""
        if wire.site_of(address) != keys.site:
            raise HetrlError(f"{address}: the keys are those of site {keys.site}; give the keys of its own site")
        self.address = address
        self.malformed = 0
        self._run = run
        self._gateway = gateway
        self._keys = keys
        # Unique across restarts of the same address, so that a late reply finds no wrong request.
        self._ids = itertools.count(time.time_ns() // 1000)
        self._pending: dict[int, asyncio.Future[Envelope | None]] = {}
        self._inbox: asyncio.Queue[Envelope | None] = asyncio.Queue()
        self._window = Window(WINDOW_BYTES)
        self._end: HetrlError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = client_socket(self._context, self._keys, self._keys.public)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._start(self._greet(), "greeting")
        self._start(self._read(), "reader")
        self._socket.connect(self._gateway)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish(HetrlError(f"{self.address}: the member is closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(LINGER_SECONDS * 1000))
        await asyncio.to_thread(self._context.term)

    async def send(
        self,
        to: str | Sequence[str],
        message: wire.Message,
        buffers: Sequence[bytes | memoryview] = (),
        *,
        reply_to: int | None = None,
    ) -> int:
        """Send to one or more members and return the message's id; waits while a receiver has too much to take.

        Large buffers are not copied: they must not change until the receiver has answered.
        Raises RunAborted, or DeadlineError when a receiver takes nothing for `SEND_SECONDS`.
        """
        receivers = (to,) if isinstance(to, str) else tuple(dict.fromkeys(to))
        message_id = next(self._ids)
        await self._transmit(message_id, receivers, message, buffers, reply_to)
        return message_id

    async def receive(self, timeout_seconds: float | None = None) -> Envelope:
        """Return the next message that is not a reply (an Undeliverable of a plain `send` counts as none).

        Raises RunAborted, or DeadlineError after `timeout_seconds`; None waits for as long as the run lasts.
        """
        self._check()
        try:
            async with asyncio.timeout(timeout_seconds):
                envelope = await self._inbox.get()
        except TimeoutError:
            raise DeadlineError(f"{self.address}: no message arrived within {timeout_seconds:g} s") from None
        if envelope is None:
            self._inbox.put_nowait(None)
            raise self._ending()
        self._acknowledge(envelope)
        return envelope

    async def request(
        self,
        to: str,
        message: wire.Message,
        buffers: Sequence[bytes | memoryview] = (),
        *,
        timeout_seconds: float,
        doing: str,
    ) -> Envelope:
        """Send and return the reply; `doing` says what for, as in "step 12: generate group 3".

        Raises HetrlError naming the peer, its site and `doing` when the peer failed or could not be reached,
        DeadlineError when it did not answer within `timeout_seconds`, RunAborted when the run ended.
        """
        message_id = next(self._ids)
        reply: asyncio.Future[Envelope | None] = asyncio.get_running_loop().create_future()
        self._pending[message_id] = reply
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._transmit(message_id, (to,), message, buffers, None)
                envelope = await reply
        except TimeoutError:
            raise DeadlineError(
                f"{wire.site_of(to)}: {to} did not answer {self.address} within {timeout_seconds:g} s ({doing}); "
                f"look into the log of {to}"
            ) from None
        finally:
            del self._pending[message_id]
        if envelope is None:
            raise self._ending()
        match envelope.message:
            case wire.Failed(cause=cause, exit_code=exit_code):
                raise error_of(exit_code, f"{to} failed ({doing}): {cause}")
            case wire.Undeliverable(cause=cause):
                raise HetrlError(f"{wire.site_of(to)}: {to} cannot be reached ({doing}): {cause}")
        return envelope

    async def reply(
        self, envelope: Envelope, message: wire.Message, buffers: Sequence[bytes | memoryview] = ()
    ) -> None:
        """Answer the message that `envelope` holds."""
        await self.send(envelope.header.source, message, buffers, reply_to=envelope.header.id)

    def start_heartbeat(self, to: str, every_seconds: float = 2.0) -> None:
        """Tell `to` every so often that this member lives, until it closes."""
        self._start(self._beat(to, every_seconds), "heartbeat")

    async def _transmit(
        self,
        message_id: int,
        receivers: tuple[str, ...],
        message: wire.Message,
        buffers: Sequence[bytes | memoryview],
        reply_to: int | None,
    ) -> None:
        """Wait for room, then hand the message to the socket."""
        self._check()
        if not receivers:
            raise HetrlError(f"{self.address}: {type(message).__name__} has no receiver")
        size_bytes = sizes(buffers)
        deadline = asyncio.get_running_loop().time() + SEND_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                while self._window.full(receivers, size_bytes):
                    await self._window.changed()
                    self._check()
                if buffers:
                    self._window.open(message_id, receivers, size_bytes)
                await self._post(message_id, receivers, message, buffers, reply_to)
        except TimeoutError:
            stuck = self._window.full(receivers, size_bytes) or (gateway_of(self._keys.site),)
            raise DeadlineError(
                f"{wire.site_of(stuck[0])}: {', '.join(stuck)} took nothing from {self.address} for "
                f"{SEND_SECONDS:g} s ({type(message).__name__}); look into its log"
            ) from None

    def _post(
        self,
        message_id: int,
        receivers: tuple[str, ...],
        message: wire.Message,
        buffers: Sequence[bytes | memoryview] = (),
        reply_to: int | None = None,
    ) -> Awaitable[Any]:
        """Give a message to the socket at once; what comes back is done when the socket took it."""
        header = wire.Header(run=self._run, source=self.address, to=receivers, id=message_id, reply_to=reply_to)
        return self._socket.send_multipart([*wire.encode(header, message), *buffers], copy=False)

    async def _beat(self, to: str, every_seconds: float) -> None:
        while True:
            await self._post(NO_ANSWER, (to,), wire.Heartbeat())
            await asyncio.sleep(every_seconds)

    async def _greet(self) -> None:
        """Say hello on each connection: the gateway learns which of its peers this address is."""
        while True:
            await recv_monitor_message(self._monitor)
            await self._post(NO_ANSWER, (gateway_of(self._keys.site),), wire.Heartbeat())

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            await asyncio.sleep(0)  # a message that is there already would not let anybody else run
            try:
                header, message = wire.decode_header(frames[0].buffer), wire.decode_message(frames[1].buffer)
            except (msgspec.MsgspecError, ValueError, LookupError) as error:
                self.malformed += 1
                _log.warning("%s: dropped a malformed message: %s", self.address, error)
                continue
            self._accept(Envelope(header, message, tuple(frame.buffer for frame in frames[2:])))

    def _accept(self, envelope: Envelope) -> None:
        """Give what arrived to whoever waits for it."""
        answered, source = envelope.header.reply_to, envelope.header.source
        match envelope.message:
            case wire.Abort(cause=cause):
                self._finish(RunAborted(f"{source} ended the run: {cause}"))
                return
            case wire.Received() if answered is not None:
                self._window.close(answered, source)
                return
            case wire.Undeliverable(receiver=receiver) if answered is not None:
                self._window.close(answered, receiver)
        waiting = self._pending.get(answered) if answered is not None else None
        if waiting is not None:
            self._acknowledge(envelope)
            if not waiting.done():
                waiting.set_result(envelope)
        elif answered is None or isinstance(envelope.message, wire.Undeliverable):
            self._inbox.put_nowait(envelope)
        else:
            self._acknowledge(envelope)
            _log.info("%s: %s of %s came too late", self.address, type(envelope.message).__name__, source)

    def _acknowledge(self, envelope: Envelope) -> None:
        """Tell the sender of buffers that they were taken."""
        if envelope.buffers:
            self._post(NO_ANSWER, (envelope.header.source,), wire.Received(), reply_to=envelope.header.id)

    def _finish(self, end: HetrlError) -> None:
        """Make every pending and later call raise `end`."""
        self._end = self._end or end
        self._inbox.put_nowait(None)
        self._window.wake()
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_result(None)

    def _check(self) -> None:
        if self._end is not None:
            raise self._ending()

    def _ending(self) -> HetrlError:
        """Return why nothing works any more, as an exception of its own for each caller."""
        return type(self._end)(str(self._end)) if self._end else HetrlError(f"{self.address}: the member is closed")

    def _start(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=f"{self.address} {name}")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a defect; nobody may wait for it in vain."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._finish(HetrlError(f"{task.get_name()} stopped: {error!r}"))
