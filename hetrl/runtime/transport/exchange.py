"""All channels of one member: one per priority to and from every other member. Pure but for three callbacks.

`emit` takes what shall go to the gateway; `fail` is told of messages that will not arrive, `offended` of what no honest
member sends. A multicast is cut once: a chunk carries a place per receiver, and is emitted once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from hetrl.runtime import wire
from hetrl.runtime.transport.arrivals import Arrivals, Offended
from hetrl.runtime.transport.channel import Outbound
from hetrl.runtime.transport.chunks import Arrival, Buffer, Chunk, Shipment
from hetrl.runtime.wire import NO_ANSWER, Priority

# 64 MiB: 10 Gb/s over a round trip of 50 ms.
WINDOW_BYTES = 64 * 2**20
_PAST_LIVES = 16  # of each member: frames of lives that are over may still be under way

Emit = Callable[[wire.Header, Sequence[Buffer]], None]
Fail = Callable[[str, tuple[int, ...], str], None]  # receiver, its messages that were under way, cause


class Exchange:
    """What the member `address`, in this life of it, sends, acknowledges and hands over; `now` is any one clock."""

    def __init__(self, address: str, run: str, incarnation: int, emit: Emit, fail: Fail, offended: Offended) -> None:
        self.address, self.incarnation = address, incarnation
        self._emit, self._fail, self._offended = emit, fail, offended
        self._header = wire.Header(run=run, source=address, to=(), id=NO_ANSWER, incarnation=incarnation)
        self._outbound: dict[tuple[str, Priority], Outbound] = {}
        self._arrivals = Arrivals(WINDOW_BYTES, self.tell, offended)
        self._lives: dict[str, int] = {}
        self._past: dict[str, deque[int]] = {}
        self._waiting: list[Shipment] = []

    # ---- sending

    def ship(
        self,
        message: int,
        receivers: Sequence[str],
        priority: Priority,
        reply_to: int | None,
        frames: Sequence[Buffer],
        now: float,
    ) -> Shipment:
        """Send as much of a message as the windows allow; the rest follows when they open, in the order of calls."""
        shipment = Shipment(message, receivers, priority, reply_to, frames)
        self._waiting.append(shipment)
        self._advance(now)
        return shipment

    def withdraw(self, shipment: Shipment, now: float) -> None:
        """Give a message up unless it has begun: one that has goes on to its end."""
        if not shipment.admitted and shipment in self._waiting:
            self._waiting.remove(shipment)
            self._advance(now)

    def _advance(self, now: float) -> None:
        """Push whoever waits, oldest first; nobody overtakes another in a channel."""
        blocked: set[tuple[str, Priority]] = set()
        waiting: list[Shipment] = []
        for shipment in self._waiting:
            keys = {(receiver, shipment.priority) for receiver in shipment.receivers}
            if blocked.isdisjoint(keys) and self._push(shipment, now):
                shipment.posted = True
                continue
            blocked |= keys
            waiting.append(shipment)
        self._waiting = waiting

    def _push(self, shipment: Shipment, now: float) -> bool:
        """Send what the windows allow of one message; return whether that is all of it."""
        channels = [self._to(receiver, shipment.priority) for receiver in shipment.receivers]
        if not shipment.admitted:
            if not all(channel.has_room(shipment.bytes) for channel in channels):
                return False
            shipment.admitted = True
            for channel in channels:
                channel.reserve(shipment.bytes, now)
        while (chunk := shipment.chunk) is not None and channels:
            if not all(channel.may_send(chunk) for channel in channels):
                return False
            places = tuple(channel.add(chunk, now) for channel in channels)
            self._emit_chunk(tuple(shipment.receivers), shipment.priority, places, chunk)
            shipment.advance()
        return True

    def _emit_chunk(
        self, receivers: tuple[str, ...], priority: Priority, places: tuple[wire.Place, ...], chunk: Chunk
    ) -> None:
        named = {"to": receivers, "id": chunk.message, "reply_to": chunk.reply_to}
        header = replace(self._header, **named, priority=priority, places=places, sizes=chunk.sizes)
        self._emit(header, [wire.encode_struct(header), *chunk.views])

    def tell(
        self,
        to: str,
        message: wire.Message,
        *,
        priority: Priority = Priority.CONTROL,
        id: int = NO_ANSWER,
        reply_to: int | None = None,
    ) -> None:
        """Send a message outside the channels: once, if it arrives at all."""
        header = replace(self._header, to=(to,), id=id, reply_to=reply_to, priority=priority)
        self._emit(header, wire.encode(header, message))

    def acknowledged(self, header: wire.Header, report: wire.Acknowledged, now: float) -> None:
        """Hear what a receiver has: send again what it lacks, and whatever has room now."""
        if report.incarnation != self.incarnation or not self._meet(header):
            return
        channel = self._to(header.source, report.priority)
        try:
            again = channel.acknowledge(report, now)
        except ValueError as error:
            self._offended(header.source, error)
            return
        for place, chunk in again:
            self._emit_chunk((header.source,), report.priority, (place,), chunk)
        self._advance(now)

    @property
    def busy(self) -> bool:
        """Return whether anything waits to be sent, or to be taken out where it was sent to."""
        return bool(self._waiting) or any(channel.open_bytes for channel in self._outbound.values())

    def tick(self, now: float) -> None:
        """Probe the channels in which nothing goes forward, and push what waits."""
        self._advance(now)
        for (receiver, _), channel in list(self._outbound.items()):
            if channel.stalled(now):
                self._probe(receiver, channel, now)

    def ask_after(self, awaited: Mapping[str, int], now: float, seconds: float) -> None:
        """Probe members that owe answers to messages and got nothing for so long.

        One that was started again since shows so, and of one that is gone its gateway tells.
        """
        for (receiver, _), channel in list(self._outbound.items()):
            if receiver in awaited and channel.idle(now, seconds):
                self._probe(receiver, channel, now, awaited[receiver])

    def hasten(self, now: float, site: str | None = None) -> None:
        """Probe every channel with something under way to `site`, or to anybody: it may be lost."""
        for (receiver, _), channel in list(self._outbound.items()):
            if channel.open_bytes and site in (None, wire.site_of(receiver)):
                self._probe(receiver, channel, now)

    def hurry(self) -> None:
        """Ask soon after what is under way, however long an answer took so far."""
        for channel in self._outbound.values():
            channel.hurry()

    def _probe(self, receiver: str, channel: Outbound, now: float, owed: int | None = None) -> None:
        """Ask what a receiver has; where it cannot be reached, the message that is `owed` an answer is refused."""
        probe, waiting = channel.probe(now)
        self.tell(receiver, probe, priority=channel.priority, id=owed or waiting or NO_ANSWER)

    # ---- receiving

    def heard(self, header: wire.Header, views: Sequence[memoryview]) -> list[Arrival]:
        """Take a chunk; return the messages that it completes. Raises ValueError where it has no place for us."""
        if len(header.places) != len(header.to) or self.address not in header.to:
            raise ValueError(f"a chunk from {header.source} without a place for {self.address}")
        place = header.places[header.to.index(self.address)]
        if self._arrivals.overrun(header, place.stream):
            return []
        if not self._meet(header):
            self._arrivals.chunks_gone += 1
            return []
        return self._arrivals.heard(header, place, views)

    def taken(self, arrival: Arrival) -> None:
        """Return the credit of a message that the application took out."""
        self._arrivals.taken(arrival)

    def probed(self, header: wire.Header, probe: wire.Probe) -> None:
        """Answer a probe."""
        if not self._arrivals.overrun(header, probe.stream) and self._meet(header):
            self._arrivals.probed(header, probe)

    @property
    def owes(self) -> bool:
        """Whether somebody is to hear what arrived: `settle` within a moment."""
        return self._arrivals.owes

    def settle(self) -> None:
        """Report to everybody whose chunks arrived or were taken out since the last report."""
        self._arrivals.settle()

    # ---- members that go and come

    def end(self, where: str, cause: str) -> None:
        """Fail what is under way to a member or to all members of a site; their channels begin anew."""
        receivers = {receiver for receiver, _ in self._outbound}
        receivers.update(receiver for shipment in self._waiting for receiver in shipment.receivers)
        for receiver in sorted(receivers):
            if where in (receiver, wire.site_of(receiver)):
                self._fail(receiver, tuple(self._renew(receiver, Priority)), cause)

    def abandon(self, receiver: str, priority: Priority, cause: str, now: float) -> None:
        """Drop what is under way to a member in one channel, which begins anew; what is asked there fails."""
        dropped = [*self._renew(receiver, [priority])]
        self._fail(receiver, (), f"{cause} ({len(dropped)} messages under way)")
        self._advance(now)

    def forget(self, member: str, cause: str) -> None:
        """Drop all state of a member that is dead: nothing of this life of it is accepted any more."""
        self.end(member, cause)
        self._retire(member)

    def _renew(self, receiver: str, priorities: Iterable[Priority]) -> Iterator[int]:
        """Begin channels to a receiver anew; yield the messages that were under way."""
        priorities = [*priorities]
        for shipment in list(self._waiting):
            if receiver in shipment.receivers and shipment.priority in priorities:
                shipment.receivers.remove(receiver)
                yield shipment.message
            if not shipment.receivers:
                shipment.posted = True
                self._waiting.remove(shipment)
        for priority in priorities:
            if (receiver, priority) in self._outbound:
                yield from self._outbound[receiver, priority].renew()

    def _meet(self, header: wire.Header) -> bool:
        """Whether a frame is of the present life of its source; a life that was not known ends the one before."""
        source, life = header.source, header.incarnation
        if life in self._past.get(source, ()):
            return False
        if self._lives.get(source, life) != life:
            self._retire(source)
            self.end(source, f"{source} restarted")
        self._lives[source] = life
        return True

    def _retire(self, source: str) -> None:
        self._arrivals.retire(source)
        if source in self._lives:
            self._past.setdefault(source, deque(maxlen=_PAST_LIVES)).append(self._lives.pop(source))

    # ---- state

    def under_way(self, message: int, receiver: str) -> bool:
        """Whether a message waits for its window or for the acknowledgement of a receiver."""
        waits = any(shipment.message == message and receiver in shipment.receivers for shipment in self._waiting)
        return waits or any(channel.holds(message) for (to, _), channel in self._outbound.items() if to == receiver)

    def stuck(self, shipment: Shipment) -> tuple[str, ...]:
        """Return the receivers that a message waits for."""
        return tuple(to for to in shipment.receivers if not self._to(to, shipment.priority).has_room(shipment.bytes))

    def open_bytes(self, receiver: str, priority: Priority) -> int:
        """Return the bytes of messages in a channel that the receiver has not taken out."""
        return self._to(receiver, priority).open_bytes

    @property
    def unacknowledged(self) -> set[str]:
        """Return the receivers of what is not known to have arrived."""
        return {receiver for (receiver, _), channel in self._outbound.items() if channel.unacknowledged}

    @property
    def chunks_resent(self) -> int:
        """Return how many chunks went a second time."""
        return sum(channel.chunks_resent for channel in self._outbound.values())

    @property
    def chunks_duplicate(self) -> int:
        """Return how many chunks came that were here already, or too late."""
        return self._arrivals.chunks_duplicate

    def _to(self, receiver: str, priority: Priority) -> Outbound:
        key = (receiver, priority)
        if key not in self._outbound:
            self._outbound[key] = Outbound(priority, WINDOW_BYTES)
        return self._outbound[key]
