"""What a member has of the others: the receiving ends of its channels, and what it owes them a report of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from hetrl.runtime import wire
from hetrl.runtime.transport.channel import Inbound
from hetrl.runtime.transport.chunks import MESSAGE_BYTES, Arrival, Assembly, Chunk, flat
from hetrl.runtime.wire import Priority
from hetrl.workload import ACTOR_GENERATION

Offended = Callable[[str, ValueError], None]  # source, what was wrong


class Arrivals:
    """Takes what comes in the present life of each member, at most `window_bytes` in each of its channels."""

    def __init__(self, window_bytes: int, tell: Callable[[str, wire.Message], None], offended: Offended) -> None:
        self.chunks_gone = 0  # that came in a life that is over, or twice in a channel that is
        self._window_bytes, self._tell, self._offended = window_bytes, tell, offended
        self._inbound: dict[tuple[str, Priority], Inbound] = {}
        self._untaken = Counter[tuple[str, Priority]]()  # bytes of whole messages, until the application takes them
        self._owed: dict[tuple[str, Priority], None] = {}

    @property
    def chunks_duplicate(self) -> int:
        """Return how many chunks came that were here already, or too late."""
        return self.chunks_gone + sum(channel.chunks_duplicate for channel in self._inbound.values())

    def heard(self, header: wire.Header, place: wire.Place, views: Sequence[memoryview]) -> list[Arrival]:
        """Take a chunk at its place; return the messages that it completes."""
        channel = self._from(header)
        chunk = Chunk(header.id, header.reply_to, header.sizes, tuple(map(flat, views)))
        whole = channel.accept(place, chunk)
        if whole:
            self._untaken[header.source, header.priority] += sum(message.bytes for message in whole)
        self._owe(header.source, channel)
        while channel.faults:
            self._offended(header.source, channel.faults.pop())
        return [
            Arrival(_header_of(message, header), message.frames, message.bytes, channel.stream) for message in whole
        ]

    def taken(self, arrival: Arrival) -> None:
        """Return the credit of a message that the application took out."""
        key = arrival.header.source, arrival.header.priority
        self._untaken[key] -= arrival.bytes
        if not self._untaken[key]:
            del self._untaken[key]
        channel = self._inbound.get(key)
        if channel is not None and channel.incarnation == arrival.header.incarnation:
            channel.take(arrival.stream, arrival.bytes)
            self._owe(arrival.header.source, channel)

    def probed(self, header: wire.Header, probe: wire.Probe) -> None:
        """Answer a probe."""
        if (report := self._from(header).answer(probe)) is not None:
            self._tell(header.source, report)

    def retire(self, source: str) -> None:
        """Forget the channels of a member whose life is over."""
        for priority in Priority:
            if (channel := self._inbound.pop((source, priority), None)) is not None:
                self.chunks_gone += channel.chunks_duplicate

    def overrun(self, header: wire.Header, stream: int) -> bool:
        """Whether a frame begins a channel anew while more of what came before waits here than a window holds.

        It is dropped, and sent again until the application has taken enough out: else whoever counts up its streams or
        lives before each message had no bound.
        """
        key = header.source, header.priority
        if self._untaken[key] <= self._window_bytes:
            return False
        channel = self._inbound.get(key)
        return channel is None or header.incarnation != channel.incarnation or stream > channel.stream

    @property
    def owes(self) -> bool:
        """Whether somebody is to hear what arrived: `settle` within a moment."""
        return bool(self._owed)

    def settle(self) -> None:
        """Report to everybody whose chunks arrived or were taken out since the last report."""
        owed, self._owed = self._owed, {}
        for source, priority in owed:
            if (channel := self._inbound.get((source, priority))) is not None:
                self._tell(source, channel.report())

    def _owe(self, source: str, channel: Inbound) -> None:
        if channel.urgent:
            self._owed.pop((source, channel.priority), None)
            self._tell(source, channel.report())
        else:
            self._owed[source, channel.priority] = None

    def _from(self, header: wire.Header) -> Inbound:
        key = (header.source, header.priority)
        if key not in self._inbound:
            # Replicas and keepers say nothing large, and are the many: what a site of them can fill is bounded by the
            # window.
            small = wire.role_of(header.source) in (ACTOR_GENERATION, wire.KEEPER)
            most = self._window_bytes if small else MESSAGE_BYTES
            self._inbound[key] = Inbound(header.priority, header.incarnation, self._window_bytes, most)
        return self._inbound[key]


def _header_of(message: Assembly, header: wire.Header) -> wire.Header:
    """Return the header of a message that the chunk with `header` completed, maybe one of a later message."""
    return replace(header, id=message.message, reply_to=message.reply_to, places=(), sizes=())
