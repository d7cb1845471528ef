"""One channel between two members, seen from either end: exactly once and in order over a network that may lose,
double and reorder. Neither end knows sockets or clocks; `hetrl.runtime.transport.exchange` drives them.

    sender      number each chunk; keep it until it is acknowledged
                at most `window_bytes` of messages, or one larger one, that the receiver's application has not taken out
                no progress for a while: probe; what the answer lacks of the chunks before the probe is sent again
    receiver    keep what came early, drop what came before, put the rest together in order
                refuse messages beyond the window or `MOST_WAITING`, which no honest sender begins
                report what is there (below a number, and ranges above it) and how many bytes were taken out

A stream is one life of the channel: after a failure the sender begins the next one at 0, and the receiver forgets the
last. Reports are cumulative, so that a lost or doubled one does no harm. (Cumulative and selective acknowledgement as
in RFC 9293 and RFC 2018; a window of what was consumed as in RFC 9000, section 4.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from hetrl.runtime.transport.chunks import MESSAGE_BYTES, Assembly, Chunk
from hetrl.runtime.wire import Acknowledged, Place, Priority, Probe

# After so long without progress a sender asks what arrived, and then after pauses that double.
STALL_SECONDS, LONGEST_STALL_SECONDS = 1.0, 8.0
STALL_ROUND_TRIPS = 4.0
_SMOOTHING = 1 / 8  # RFC 6298, section 2
MOST_WAITING = 2**16  # messages that the application has not taken out; small ones cost more than their bytes
MOST_OPEN = MOST_WAITING // 2  # that a sender lets be under way, which knows of bytes that were taken alone
MOST_EARLY = 2**14  # chunks that came before one that is missing
_MOST_RANGES = 64  # of a report, which stays small; what it leaves out is only sent again


@dataclass
class _Sent:
    """A chunk that is not acknowledged."""

    chunk: Chunk
    seconds: float
    again: bool = False


class Outbound:
    """The sender's end; all `now` are seconds of one clock."""

    def __init__(self, priority: Priority, window_bytes: int) -> None:
        self.priority = priority
        self.stream = 0
        self.chunks_resent = 0
        self._window_bytes = window_bytes
        self._round_trip_seconds: float | None = None
        self._begin()

    def _begin(self) -> None:
        self.stream += 1
        self._sent: dict[int, _Sent] = {}
        self._sequence = 0
        self._ends = deque[int]()  # of the messages that begun, in bytes since the stream began
        self._unacknowledged_bytes = self._reserved_bytes = self._taken_bytes = 0
        self._moved_seconds = 0.0  # when something last went forward
        self._probes = self._horizon = 0
        self._newest: int | None = None
        self._stall_seconds = STALL_SECONDS

    def renew(self) -> tuple[int, ...]:
        """Begin the next stream; return the messages that were under way, oldest first."""
        lost = tuple(dict.fromkeys(sent.chunk.message for sent in self._sent.values()))
        self._begin()
        return lost

    @property
    def unacknowledged(self) -> bool:
        """Whether a chunk is not known to have arrived."""
        return bool(self._sent)

    def holds(self, message: int) -> bool:
        """Whether a message is not known to have arrived, or is the newest of those that were not taken out."""
        newest = self.open_bytes > 0 and message == self._newest
        return newest or any(sent.chunk.message == message for sent in self._sent.values())

    @property
    def open_bytes(self) -> int:
        """Return the bytes of messages that the receiver has not taken out."""
        return self._reserved_bytes - self._taken_bytes

    def has_room(self, message_bytes: int) -> bool:
        """Whether a message may begin."""
        if self.open_bytes == 0:
            return True
        return self.open_bytes + message_bytes <= self._window_bytes and self._open_messages < MOST_OPEN

    @property
    def _open_messages(self) -> int:
        """Return how many messages the receiver has not taken out, as if it took them in their order."""
        while self._ends and self._ends[0] <= self._taken_bytes:
            self._ends.popleft()
        return len(self._ends)

    def reserve(self, message_bytes: int, now: float) -> None:
        """Count a message that begins."""
        if self.open_bytes == 0:
            self._moved_seconds = now
        self._reserved_bytes += message_bytes
        self._ends.append(self._reserved_bytes)

    def may_send(self, chunk: Chunk) -> bool:
        """Whether a chunk may go; only a message larger than the window ever waits for this."""
        return not self._sent or self._unacknowledged_bytes + chunk.bytes <= self._window_bytes

    def add(self, chunk: Chunk, now: float) -> Place:
        """Keep a chunk that goes, and return its place."""
        place = Place(stream=self.stream, sequence=self._sequence)
        self._sent[self._sequence] = _Sent(chunk, now)
        self._newest = chunk.message
        self._sequence += 1
        self._unacknowledged_bytes += chunk.bytes
        return place

    def acknowledge(self, report: Acknowledged, now: float) -> list[tuple[Place, Chunk]]:
        """Let go what arrived and return what must be sent again; raises ValueError for a report that cannot be."""
        if report.stream != self.stream:
            return []
        self._check(report)
        arrived = list(self._arrived(report))
        for sequence in arrived:
            sent = self._sent.pop(sequence)
            self._unacknowledged_bytes -= sent.chunk.bytes
            if not sent.again:  # of one that went twice nobody knows which was answered (Karn, RFC 6298, section 3)
                self._round_trip_seconds = smoothed(self._round_trip_seconds, now - sent.seconds)
        if arrived or report.taken_bytes > self._taken_bytes:
            self._taken_bytes = max(self._taken_bytes, report.taken_bytes)
            self._moved_seconds, self._stall_seconds = now, self._patience_seconds
        return self._again(now) if report.answers == self._probes > 0 else []

    def _check(self, report: Acknowledged) -> None:
        """Raise ValueError for ranges that no receiver makes, and for what never went."""
        bounds = [report.cumulative, *chain.from_iterable(report.ranges)]
        if bounds[0] < 0 or len(report.ranges) > _MOST_RANGES or any(one >= other for one, other in pairwise(bounds)):
            raise ValueError(f"acknowledged {report.cumulative} chunks and {len(report.ranges)} ranges out of order")
        if bounds[-1] > self._sequence or not 0 <= report.taken_bytes <= self._reserved_bytes:
            raise ValueError(f"acknowledged {bounds[-1]} of {self._sequence} chunks, {report.taken_bytes} bytes taken")

    def _arrived(self, report: Acknowledged) -> Iterator[int]:
        """Yield the kept sequence numbers that a report names."""
        for sequence in self._sent:
            if sequence >= report.cumulative:
                break
            yield sequence
        for start, end in report.ranges:
            yield from (sequence for sequence in range(start, end) if sequence in self._sent)

    def _again(self, now: float) -> list[tuple[Place, Chunk]]:
        """Return the chunks that were ahead of the probe and are not there."""
        self._moved_seconds = now
        missing = {sequence: sent for sequence, sent in self._sent.items() if sequence < self._horizon}
        for sent in missing.values():
            sent.again = True
        self.chunks_resent += len(missing)
        self._horizon = 0
        return [(Place(stream=self.stream, sequence=sequence), sent.chunk) for sequence, sent in missing.items()]

    def hurry(self) -> None:
        """Wait for progress as briefly as at first."""
        self._stall_seconds = STALL_SECONDS

    def stalled(self, now: float) -> bool:
        """Whether something is under way and nothing went forward for longer than it should take."""
        return self.open_bytes > 0 and now - self._moved_seconds > self._stall_seconds

    def idle(self, now: float, seconds: float) -> bool:
        """Whether nothing is under way, nor was for so long."""
        return self.open_bytes == 0 and now - self._moved_seconds > seconds

    def probe(self, now: float) -> tuple[Probe, int | None]:
        """Return a question for the receiver's state, and a message that waits for the answer.

        It asks for the chunks before it only: what was sent later may just not have arrived yet.
        """
        self._probes += 1
        self._horizon = self._sequence
        self._moved_seconds = now
        if self.open_bytes:
            self._stall_seconds = min(2 * self._stall_seconds, max(LONGEST_STALL_SECONDS, self._patience_seconds))
        waiting = next((sent.chunk.message for sent in self._sent.values()), self._newest)
        return Probe(stream=self.stream, number=self._probes), waiting

    @property
    def _patience_seconds(self) -> float:
        return max(STALL_SECONDS, STALL_ROUND_TRIPS * (self._round_trip_seconds or 0.0))


class Inbound:
    """The receiver's end."""

    def __init__(
        self, priority: Priority, incarnation: int, window_bytes: int, message_bytes: int = MESSAGE_BYTES
    ) -> None:
        """Begin with nothing from this incarnation of the sender, whose messages have at most `message_bytes`."""
        self.priority, self.incarnation = priority, incarnation
        self.chunks_duplicate = 0
        self.faults: list[ValueError] = []  # chunks that make no sense, for whoever counts them
        self._window_bytes, self._message_bytes = window_bytes, message_bytes
        self._begin(0)

    def _begin(self, stream: int) -> None:
        self.stream = stream
        self._expected = 0
        self._early: dict[int, Chunk] = {}
        self._assembly: Assembly | None = None
        self.early_bytes = self._taken_bytes = self._news_bytes = 0
        self._begun_bytes = self._begun = self._taken = 0  # of messages, since the stream began

    def accept(self, place: Place, chunk: Chunk) -> list[Assembly]:
        """Take a chunk and return the messages that it completes, in order."""
        if place.stream > self.stream:
            self._begin(place.stream)
        if place.stream < self.stream or place.sequence < self._expected or place.sequence in self._early:
            self.chunks_duplicate += 1
            return []
        # Only a message larger than the window has chunks beyond it under way; what is dropped is sent again.
        full = self.early_bytes + chunk.bytes > self._window_bytes or len(self._early) >= MOST_EARLY
        if place.sequence > self._expected and full:
            return []
        self._early[place.sequence] = chunk
        self.early_bytes += chunk.bytes
        self._news_bytes += chunk.bytes
        return list(self._in_order())

    def _in_order(self) -> Iterator[Assembly]:
        while self._expected in self._early:
            chunk = self._early.pop(self._expected)
            self.early_bytes -= chunk.bytes
            self._expected += 1
            self._put(chunk)
            if self._assembly is not None and self._assembly.complete:
                yield self._assembly
                self._assembly = None

    def _put(self, chunk: Chunk) -> None:
        """Add a chunk to its message; one that makes no sense costs the message."""
        try:
            if chunk.sizes:
                self._assembly = self._admitted(chunk)
            elif self._assembly is not None:
                self._assembly.add(chunk)
        except ValueError as error:
            self._assembly = None
            self.faults.append(error)

    def _admitted(self, first: Chunk) -> Assembly:
        """Begin a message; raises ValueError for one that its sender should have kept until others are taken out."""
        message_bytes, waiting = sum(first.sizes), self._begun - self._taken
        open_bytes = self._begun_bytes - self._taken_bytes
        if message_bytes > self._message_bytes:
            raise ValueError(f"message {first.message}: {message_bytes} bytes, at most {self._message_bytes} may come")
        if waiting and (open_bytes + message_bytes > self._window_bytes or waiting >= MOST_WAITING):
            raise ValueError(f"message {first.message}: {waiting} messages of {open_bytes} bytes wait here already")
        assembly = Assembly(first)
        self._begun_bytes += assembly.bytes
        self._begun += 1
        return assembly

    def take(self, stream: int, message_bytes: int) -> None:
        """Count a message of `stream` as taken out by the application."""
        if stream == self.stream:
            self._taken += 1
            self._taken_bytes += message_bytes
            self._news_bytes += message_bytes

    @property
    def urgent(self) -> bool:
        """Whether the sender should hear soon, lest it wait for its window."""
        return 4 * self._news_bytes >= self._window_bytes

    def answer(self, probe: Probe) -> Acknowledged | None:
        """Return the report that a probe asks for; None when it asks about a stream that is over."""
        if probe.stream > self.stream:
            self._begin(probe.stream)
        return self.report(probe.number) if probe.stream == self.stream else None

    def report(self, answers: int = 0) -> Acknowledged:
        """Return what is here."""
        self._news_bytes = 0
        starts = sorted(number for number in self._early if number - 1 not in self._early)
        ends = sorted(number + 1 for number in self._early if number + 1 not in self._early)
        return Acknowledged(
            priority=self.priority,
            incarnation=self.incarnation,
            stream=self.stream,
            cumulative=self._expected,
            ranges=tuple(zip(starts, ends, strict=True))[:_MOST_RANGES],
            taken_bytes=self._taken_bytes,
            answers=answers,
        )


def smoothed(known: float | None, found: float) -> float:
    """Return a smoothed round trip that takes another one in; None: it is the first."""
    return found if known is None else known + _SMOOTHING * (found - known)
