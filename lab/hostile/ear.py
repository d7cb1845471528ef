"""A member's ear without its sockets, and what is said into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import zmq
from msgspec.structs import replace

from hetrl.runtime import wire
from hetrl.runtime.transport.exchange import Exchange
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.mailbox import Mailbox
from hetrl.runtime.transport.offences import Offences
from hetrl.runtime.transport.receiver import Receiver
from hetrl.runtime.wire.authority import OfTheTable

RUN = "run"
# What travels outside the channels.
PLAIN = (
    wire.Acknowledged,
    wire.Probe,
    wire.LinkOut,
    wire.LinkRestored,
    wire.Undeliverable,
    wire.Heartbeat,
    wire.LinkStatsReply,
)


class Ear:
    """The member `address`, to be made in an event loop; what it would send to anybody is dropped."""

    def __init__(self, address: str) -> None:
        """Hear as this member; who is cut off is listed under `cut_off`."""
        self.address = address
        self._sequences: Counter[str] = Counter()
        self.cut_off: list[str] = []
        self.mailbox = Mailbox(address, RUN, lambda arrival: self.receiver.take(arrival))
        self.offences = Offences(address, lambda peer, cause: self.cut_off.append(peer))
        self.exchange = Exchange(
            address, RUN, 1, lambda header, frames: None, self.mailbox.lose, lambda *what: self.offences.add(*what)
        )
        self.receiver = Receiver(self.exchange, self.mailbox, OfTheTable(), self.offences, Links(), lambda: None)

    def hear(self, frames: Sequence[bytes]) -> None:
        """Take the frames of one message."""
        self.receiver.hear([zmq.Frame(frame) for frame in frames])

    def told(self, source: str, message: wire.Message, reply_to: int | None = None) -> bool:
        """Say something to the member; whether it took it for no offence."""
        before = self.offences.counts[source]
        struct, header = (
            wire.encode_struct(message),
            wire.Header(run=RUN, source=source, to=(self.address,), id=5, reply_to=reply_to),
        )
        if not isinstance(message, PLAIN):
            place = wire.Place(stream=1, sequence=self._sequences[source])
            self._sequences[source] += 1
            header = replace(header, places=(place,), sizes=(len(struct),))
        self.hear([wire.encode_struct(header), struct])
        return self.offences.counts[source] == before
