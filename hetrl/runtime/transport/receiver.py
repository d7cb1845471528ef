"""What comes to a member: chunks go to its exchange, whole messages to its mailbox, a gateway's refusals to both.

What its source may not say (`hetrl.runtime.wire.authority`) or nobody can read is dropped, and an offence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import zmq

from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Arrival
from hetrl.runtime.transport.exchange import Exchange
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.mailbox import Envelope, Mailbox, RunAborted
from hetrl.runtime.transport.offences import Offences
from hetrl.runtime.wire.authority import Authority
from hetrl.text import printable_lines

_SETTLE_SECONDS = 0.02  # one report for many small messages

_log = logging.getLogger(__name__)


class Receiver:
    """Hears the connections of one member; `moved` is called when a sender that waits may go on."""

    def __init__(
        self,
        exchange: Exchange,
        mailbox: Mailbox,
        authority: Authority,
        offences: Offences,
        links: Links,
        moved: Callable[[], None],
    ) -> None:
        self._exchange, self._mailbox, self._moved = exchange, mailbox, moved
        self._authority, self._offences, self._links = authority, offences, links
        self._settling = False
        self._expected: str | None = None  # whose word is waited for
        self.heard = 0.0  # when anything of it came last, by the loop's clock

    def expect(self, source: str) -> None:
        """Note from here on when a member says anything; that it lives is no message to anybody else."""
        self._expected, self.heard = source, asyncio.get_running_loop().time()

    def hear(self, frames: list[zmq.Frame]) -> None:
        """Take a chunk, or a message outside the channels."""
        source = "its own gateway"  # which read the header already, and knows the source
        try:
            header = wire.decode_header(frames[0].buffer)
            source = header.source
            if self._offences.cause(source) is not None:
                return
            if source == self._expected:
                self.heard = asyncio.get_running_loop().time()
            if header.places:
                self._take_chunk(header, [frame.buffer for frame in frames[1:]])
            else:
                self._attend(header, self._read(header, frames[1].buffer))
        except (msgspec.MsgspecError, ValueError, LookupError) as error:
            self._offences.add(source, error)

    def _take_chunk(self, header: wire.Header, views: Sequence[memoryview]) -> None:
        arrivals = self._exchange.heard(header, views)
        self._settle_soon()
        for arrival in arrivals:
            try:
                message = self._read(arrival.header, arrival.frames[0])
                self._accept(Envelope(arrival.header, message, tuple(arrival.frames[1:])), arrival)
            except (msgspec.MsgspecError, ValueError) as error:
                self.take(arrival)
                self._offences.add(header.source, error)

    def _read(self, header: wire.Header, struct: bytes | memoryview) -> wire.Message:
        """Read a message; raises ValueError where its source may not say it."""
        message = wire.decode_message(struct)
        if refusal := self._authority.refusal(message, header, self._exchange.address):
            raise ValueError(refusal)
        return _legible(message)

    def take(self, arrival: Arrival) -> None:
        """Return the credit of a message that the application took out."""
        self._exchange.taken(arrival)
        self._settle_soon()

    def _attend(self, header: wire.Header, message: wire.Message) -> None:
        """Take what travels outside the channels."""
        now = asyncio.get_running_loop().time()
        match message:
            case wire.Acknowledged():
                self._exchange.acknowledged(header, message, now)
                self._moved()
            case wire.Probe():
                self._exchange.probed(header, message)
            case wire.LinkOut(site=site):
                self._links.lost(site)
            case wire.LinkRestored(site=site):
                self._links.restored(site)
                self._exchange.hasten(now, site)
            case wire.GatewayEnded(site=site):
                cause = f"the gateway of {site} has ended"
                self._exchange.end(site, cause)
                self._moved()
                self._links.give_up(site, cause)
            case wire.Undeliverable(receiver=receiver, cause=cause):
                self._refused(header, receiver, cause)
            case wire.Heartbeat() if header.source == self._expected:
                pass
            case wire.Heartbeat() | wire.LinkStatsReply():
                self._accept(Envelope(header, message, ()), None)
            case _:
                raise ValueError(f"{type(message).__name__} of {header.source} outside the channels")

    def _accept(self, envelope: Envelope, arrival: Arrival | None) -> None:
        """Give what arrived to whoever waits for it."""
        source, message, asked = envelope.header.source, envelope.message, self._mailbox.asked(envelope.header.reply_to)
        if asked not in (None, source):
            raise ValueError(f"{type(message).__name__} of {source} answers what {asked} was asked")
        if isinstance(message, wire.Abort):
            self._mailbox.finish(RunAborted(f"{source} ended the run: {message.cause}"))
            self._moved()
        elif not self._mailbox.put(envelope, arrival):
            _log.debug("%s: %s of %s came too late", self._exchange.address, type(message).__name__, source)

    def _refused(self, header: wire.Header, receiver: str, cause: str) -> None:
        """Hear from a gateway that a member or a site cannot be reached."""
        answered = header.reply_to
        asked = self._mailbox.asked(answered)
        if answered is not None and asked is not None and wire.is_gateway(asked):
            self._mailbox.lose(receiver, (answered,), cause)
        elif answered is None or asked == receiver or self._exchange.under_way(answered, receiver):
            self._exchange.end(receiver, cause)
            self._moved()
            here = wire.site_of(self._exchange.address)
            if header.source == wire.gateway_of(here) and receiver == wire.site_of(receiver):
                self._links.give_up(receiver, cause)

    def _settle_soon(self) -> None:
        if self._exchange.owes and not self._settling:
            self._settling = True
            asyncio.get_running_loop().call_later(_SETTLE_SECONDS, self._settle)

    def _settle(self) -> None:
        self._settling = False
        self._exchange.settle()


def _legible(message: wire.Message) -> wire.Message:
    """Return a message whose cause, if it has one, may go to a log and a terminal: it is a stranger's text."""
    cause = getattr(message, "cause", None)
    return msgspec.structs.replace(message, cause=printable_lines(cause)) if isinstance(cause, str) else message
