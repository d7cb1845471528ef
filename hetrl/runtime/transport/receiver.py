"""What comes to a member: chunks go to its exchange, whole messages to its mailbox, a gateway's refusals to both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Arrival
from hetrl.runtime.transport.exchange import Exchange
from hetrl.runtime.transport.mailbox import Envelope, Mailbox, RunAborted

_SETTLE_SECONDS = 0.02  # one report for many small messages

_log = logging.getLogger(__name__)


class Receiver:
    """Hears the connections of one member; `moved` is called when a sender that waits may go on."""

    def __init__(self, exchange: Exchange, mailbox: Mailbox, moved: Callable[[], None]) -> None:
        self.malformed = 0
        self._exchange, self._mailbox, self._moved = exchange, mailbox, moved
        self._settling = False

    def hear(self, frames: list[zmq.Frame]) -> None:
        """Take a chunk, or a message outside the channels; a malformed one is counted and dropped."""
        try:
            header = wire.decode_header(frames[0].buffer)
            if not header.places:
                self._attend(header, wire.decode_message(frames[1].buffer))
                return
            arrivals = self._exchange.heard(header, [frame.buffer for frame in frames[1:]])
        except (msgspec.MsgspecError, ValueError, LookupError) as error:
            self._drop(error)
            return
        self._settle_soon()
        for arrival in arrivals:
            try:
                message = wire.decode_message(arrival.frames[0])
            except (msgspec.MsgspecError, ValueError) as error:
                self.take(arrival)
                self._drop(error)
                continue
            self._accept(Envelope(arrival.header, message, tuple(arrival.frames[1:])), arrival)

    def take(self, arrival: Arrival) -> None:
        """Return the credit of a message that the application took out."""
        self._exchange.taken(arrival)
        self._settle_soon()

    def _drop(self, error: Exception) -> None:
        self.malformed += 1
        _log.warning("%s: dropped a malformed message: %s", self._exchange.address, error)

    def _attend(self, header: wire.Header, message: wire.Message) -> None:
        """Take what travels outside the channels."""
        now = asyncio.get_running_loop().time()
        match message:
            case wire.Acknowledged():
                self._exchange.acknowledged(header, message, now)
                self._moved()
            case wire.Probe():
                self._exchange.probed(header, message)
            case wire.LinkRestored(site=site):
                self._exchange.hasten(now, site)
            case wire.Undeliverable(receiver=receiver, cause=cause):
                self._refused(header, receiver, cause)
            case _:
                self._accept(Envelope(header, message, ()), None)

    def _accept(self, envelope: Envelope, arrival: Arrival | None) -> None:
        """Give what arrived to whoever waits for it."""
        source, message = envelope.header.source, envelope.message
        if isinstance(message, wire.Abort):
            self._mailbox.finish(RunAborted(f"{source} ended the run: {message.cause}"))
            self._moved()
        elif not self._mailbox.put(envelope, arrival):
            _log.info("%s: %s of %s came too late", self._exchange.address, type(message).__name__, source)

    def _refused(self, header: wire.Header, receiver: str, cause: str) -> None:
        """Hear from a gateway that a member or a site cannot be reached."""
        answered = header.reply_to
        if not wire.is_gateway(header.source):
            raise ValueError(f"{header.source} is no gateway")
        asked = self._mailbox.asked(answered)
        if answered is not None and asked is not None and wire.is_gateway(asked):
            self._mailbox.lose(receiver, (answered,), cause)
        elif answered is None or self._exchange.under_way(answered, receiver):
            self._exchange.end(receiver, cause)
            self._moved()

    def _settle_soon(self) -> None:
        if self._exchange.owes and not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_later(_SETTLE_SECONDS, self._settle)

    def _settle(self) -> None:
        self._settling = False
        self._exchange.settle()
