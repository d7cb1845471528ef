"""What ranks send each other inside operations: numbered pieces of streams, matched by name on both ends.

sender:     a piece goes at once while the receiver has fewer than AHEAD_BYTES of operations that it has not begun;
            otherwise it waits until the receiver says `WanReady` for this stream
receiver:   a piece of an operation that has begun lands in its place in the result, an earlier one is kept

So a receiver keeps little of each source, and no operation waits for room that another one takes. A source that goes
further ahead than that is broken: its pieces are refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetrl.errors import HetrlError
from hetrl.runtime import wire

PIECE_BYTES = 4 * 2**20
# A small tensor is cut, too: each of a link's streams carries a part of it (`hetrl.runtime.gateway.peer_link.STREAMS`),
# so that all of them grow their windows and keep them, and gateways pass on what they have while the rest comes.
_PIECES, _LEAST_PIECE_BYTES = 4, 64 * 1024
_ELEMENT_BYTES = 16  # of the largest type: no piece ends inside an element
AHEAD_BYTES = 32 * 2**20  # 1 Gb/s for 250 ms: the answer of a receiver that is there comes before this is sent
# What is kept of a source: of a group that ended there, and of the next one, whose pieces come before it is known here.
KEPT_BYTES = 2 * (AHEAD_BYTES + PIECE_BYTES)
_BESIDES_BYTES = 256  # of a piece that is kept: its message and its place in a list


@dataclass(frozen=True)
class Key:
    """The name of a stream; with its source it is unique among the ranks of a run."""

    group: str
    operation: str
    sequence: int
    tag: int = 0

    def __str__(self) -> str:
        return f"{self.operation} {self.sequence}"


def key_of(message: wire.WanPiece | wire.WanReady) -> Key:
    """Return the name of the stream that a message belongs to."""
    return Key(message.group, message.operation, message.sequence, message.tag)


def piece_bytes(size_bytes: int) -> int:
    """Return the size of the pieces of so many bytes."""
    share = -(-size_bytes // (_PIECES * _ELEMENT_BYTES)) * _ELEMENT_BYTES
    return min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, share))


def cuts(size_bytes: int, each_bytes: int | None = None) -> list[slice]:
    """Cut so many bytes into pieces of at most `each_bytes`, of `piece_bytes` unless it is given."""
    each_bytes = each_bytes or piece_bytes(size_bytes)
    return [slice(start, min(start + each_bytes, size_bytes)) for start in range(0, size_bytes, each_bytes)]


def kept_bytes(piece: memoryview) -> int:
    """Return what a piece takes that is kept; both ends count it."""
    return piece.nbytes + _BESIDES_BYTES


class Arrivals:
    """One stream at its receiver: pieces land in `place`, a writable view of bytes."""

    def __init__(self, key: Key, source: str, place: memoryview, cuts: Sequence[slice], dtype: str) -> None:
        self.key, self.source = key, source
        self._place, self._cuts, self._dtype = place, cuts, dtype
        self._landed: dict[int, asyncio.Future[None]] = {}

    async def piece(self, number: int) -> None:
        """Wait until the piece has landed; raises HetrlError when the source sends something else."""
        await self._future(number)

    async def all(self) -> None:
        """Wait for every piece."""
        for number in range(len(self._cuts)):
            await self.piece(number)

    @property
    def size_bytes(self) -> int:
        """Return how many bytes the stream fills."""
        return self._place.nbytes

    @property
    def waiting(self) -> bool:
        """Whether somebody waits, or waited until a deadline, for a piece that has not landed."""
        return any(not future.done() or future.cancelled() for future in self._landed.values())

    def land(self, message: wire.WanPiece, buffer: memoryview) -> None:
        """Put a piece into its place."""
        future = self._future(message.number)
        if future.done():
            return
        if error := self._mismatch(message, buffer):
            future.set_exception(error)
            return
        self._put(message.number, buffer)
        future.set_result(None)

    def _put(self, number: int, buffer: memoryview) -> None:
        np.frombuffer(self._place[self._cuts[number]], np.uint8)[:] = np.frombuffer(buffer, np.uint8)

    def _fits(self, number: int, size_bytes: int) -> bool:
        return self._place[self._cuts[number]].nbytes == size_bytes

    def _mismatch(self, message: wire.WanPiece, buffer: memoryview) -> HetrlError | None:
        """Return what is wrong with a piece."""
        if (message.size_bytes, message.dtype) != (self._place.nbytes, self._dtype):
            return HetrlError(
                f"{self.key}: {self.source} sends {message.size_bytes} bytes of {message.dtype}, expected are "
                f"{self._place.nbytes} bytes of {self._dtype}; every rank must call it with the same sizes"
            )
        if not 0 <= message.number < len(self._cuts) or not self._fits(message.number, buffer.nbytes):
            return HetrlError(f"{self.key}: {self.source} cuts the tensor differently; is hetrl the same everywhere?")
        return None

    def _future(self, number: int) -> asyncio.Future[None]:
        if number not in self._landed:
            self._landed[number] = asyncio.get_running_loop().create_future()
        return self._landed[number]


class Inbox:
    """All streams towards this rank."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, Key], Arrivals] = {}
        self._early: defaultdict[tuple[str, Key], list[tuple[wire.WanPiece, memoryview]]] = defaultdict(list)
        self._kept: Counter[str] = Counter()  # bytes of each source, what a piece takes besides included

    def begin(self, arrivals: Arrivals) -> None:
        """Let pieces land from now on, those that came early included."""
        name = (arrivals.source, arrivals.key)
        self._begun[name] = arrivals
        for message, buffer in self._pop(name):
            arrivals.land(message, buffer)

    def end(self, arrivals: Arrivals) -> None:
        """Forget a stream."""
        self._begun.pop((arrivals.source, arrivals.key), None)

    def take(self, source: str, message: wire.WanPiece, buffer: memoryview) -> None:
        """Let a piece land, or keep it until its operation begins here; raises ValueError where too much is kept."""
        name = (source, key_of(message))
        if name in self._begun:
            self._begun[name].land(message, buffer)
            return
        if self._kept[source] + kept_bytes(buffer) > KEPT_BYTES:
            raise ValueError(f"{source} sent more than {KEPT_BYTES} bytes ahead of what has begun here")
        self._early[name].append((message, buffer))
        self._kept[source] += kept_bytes(buffer)

    def awaited(self, group: str) -> set[str]:
        """Return the sources that operations of a group wait for."""
        return {
            arrivals.source for (_, key), arrivals in self._begun.items() if key.group == group and arrivals.waiting
        }

    def early_bytes(self) -> int:
        """Return how much is kept for operations that have not begun here."""
        return sum(buffer.nbytes for kept in self._early.values() for _, buffer in kept)

    def forget(self, group: str) -> None:
        """Drop the streams of a group that is over."""
        self._begun = {name: arrivals for name, arrivals in self._begun.items() if name[1].group != group}
        for name in [name for name in self._early if name[1].group == group]:
            self._pop(name)

    def _pop(self, name: tuple[str, Key]) -> list[tuple[wire.WanPiece, memoryview]]:
        kept = self._early.pop(name, [])
        self._kept[name[0]] -= sum(kept_bytes(buffer) for _, buffer in kept)
        return kept


class Outbox:
    """Which pieces may go: `kept_bytes` sent to each receiver ahead of its beginning the operation, at most so many."""

    def __init__(self, limit_bytes: int = AHEAD_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._ahead: dict[tuple[str, Key], int] = {}
        self._ahead_bytes: Counter[str] = Counter()
        self._ready: set[tuple[str, Key]] = set()
        self._ended: set[tuple[str, Key]] = set()  # sent to the end before the receiver began
        self._changed = asyncio.Event()

    def blockers(self, receivers: Sequence[str], key: Key, size_bytes: int) -> list[str]:
        """Return the receivers that must begin the operation before `size_bytes` more may go."""
        return [
            receiver
            for receiver in receivers
            if (receiver, key) not in self._ready
            and self._ahead_bytes[receiver]
            and self._ahead_bytes[receiver] + size_bytes > self._limit_bytes
        ]

    async def admit(self, receivers: Sequence[str], key: Key, size_bytes: int) -> None:
        """Wait until a piece may go, and count it."""
        while self.blockers(receivers, key, size_bytes):
            self._changed.clear()
            await self._changed.wait()
        for receiver in receivers:
            if (receiver, key) not in self._ready:
                self._ahead[receiver, key] = self._ahead.get((receiver, key), 0) + size_bytes
                self._ahead_bytes[receiver] += size_bytes

    def ready(self, receiver: str, key: Key) -> None:
        """The receiver has begun the operation, be it before or after this rank."""
        self._ahead_bytes[receiver] -= self._ahead.pop((receiver, key), 0)
        if (receiver, key) in self._ended:
            self._ended.remove((receiver, key))
        else:
            self._ready.add((receiver, key))
        self._changed.set()

    def end(self, receivers: Sequence[str], key: Key) -> None:
        """All pieces are sent; a stream without any is one that its receiver never begins."""
        streams = {(receiver, key) for receiver in receivers}
        self._ended |= streams & self._ahead.keys()
        self._ready -= streams

    def forget(self, group: str) -> None:
        """Drop the streams of a group that is over."""
        self._ready = {name for name in self._ready if name[1].group != group}
        self._ended = {name for name in self._ended if name[1].group != group}
        for name in [name for name in self._ahead if name[1].group == group]:
            self._ahead_bytes[name[0]] -= self._ahead.pop(name)
        self._changed.set()
