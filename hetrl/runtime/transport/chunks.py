"""Messages cut into chunks and put together again; nothing is copied but what a message of several chunks needs.

    Shipment -> Chunk, Chunk, ... over the channels -> Assembly -> Arrival

A message is the bytes of its struct and of its buffers, one after the other. A chunk is at most `CHUNK_BYTES` of that,
as views that end where the struct or a buffer ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy

from hetrl.runtime import wire
from hetrl.runtime.wire import STRUCT_BYTES, Priority

CHUNK_BYTES = 2**20
MESSAGE_BYTES = 2**32  # no member may make another one reserve more
MOST_FRAMES = 1024  # of a message: its struct and its buffers

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Chunk:
    """Up to `CHUNK_BYTES` of one message; `sizes` are those of its struct and buffers, on the first chunk only."""

    message: int
    reply_to: int | None
    sizes: tuple[int, ...]
    views: tuple[memoryview, ...]

    @cached_property
    def bytes(self) -> int:
        """Return the bytes that the views show."""
        return sum(view.nbytes for view in self.views)


def cut(message: int, reply_to: int | None, frames: Sequence[Buffer]) -> Iterator[Chunk]:
    """Yield the chunks of a message whose struct and buffers are `frames`; they show these buffers, uncopied."""
    sizes = tuple(memoryview(frame).nbytes for frame in frames)
    views: list[memoryview] = []
    room = CHUNK_BYTES
    for view in map(flat, frames):
        while view.nbytes:
            if room == 0:
                yield Chunk(message, reply_to, sizes, tuple(views))
                views, room, sizes = [], CHUNK_BYTES, ()
            views.append(view[:room])
            view = view[room:]
            room -= views[-1].nbytes
    yield Chunk(message, reply_to, sizes, tuple(views))


class Assembly:
    """The struct and the buffers of one message, filled chunk by chunk in order."""

    def __init__(self, first: Chunk) -> None:
        """Reserve what the first chunk announces; raises ValueError for sizes that no message has."""
        sizes = first.sizes
        possible = 0 < len(sizes) <= MOST_FRAMES and min(sizes) >= 0 and sizes[0] <= STRUCT_BYTES
        if not possible or sum(sizes) > MESSAGE_BYTES:
            raise ValueError(f"message {first.message} begins with {len(sizes)} sizes: {sizes[:4]}")
        self.message, self.reply_to = first.message, first.reply_to
        self.bytes = sum(first.sizes)
        self._missing_bytes = self.bytes
        if first.bytes == self.bytes:
            self._frames = _as_they_are(first)
            self._missing_bytes = 0
        else:
            # Pages of an empty array are taken only when bytes arrive.
            self._frames = [numpy.empty(size, numpy.uint8).data for size in first.sizes]
            self._rest = [frame for frame in self._frames if frame.nbytes]
            self.add(first)

    @property
    def complete(self) -> bool:
        """Whether every byte is there."""
        return self._missing_bytes == 0

    @property
    def frames(self) -> list[memoryview]:
        """Return the struct and the buffers, read-only."""
        return [frame.toreadonly() for frame in self._frames]

    def add(self, chunk: Chunk) -> None:
        """Put the bytes of the next chunk into their place; raises ValueError where the message has no room for it."""
        if chunk.bytes > self._missing_bytes or chunk.message != self.message:
            raise ValueError(f"{chunk.bytes} bytes of message {chunk.message} do not fit message {self.message}")
        for view in chunk.views:
            while view.nbytes:
                place = self._rest[0]
                count = min(view.nbytes, place.nbytes)
                place[:count] = view[:count]
                view, place = view[count:], place[count:]
                self._rest[:1] = [place] if place.nbytes else []
        self._missing_bytes -= chunk.bytes


def _as_they_are(chunk: Chunk) -> list[memoryview]:
    """Return the frames of a message of one chunk; raises ValueError where a view is not one of them."""
    views = iter(chunk.views)
    frames = [next(views, memoryview(b"")) if size else memoryview(b"") for size in chunk.sizes]
    if tuple(frame.nbytes for frame in frames) != chunk.sizes:
        raise ValueError(f"message {chunk.message} is not cut where its buffers end")
    return frames


def flat(data: Buffer) -> memoryview:
    """Return the bytes of a buffer; memoryview.cast refuses empty ones."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def bytes_of(frames: Sequence[Any]) -> int:
    """Return the bytes of all frames, be they zmq frames or buffers."""
    return sum(memoryview(frame).nbytes for frame in frames)


class Shipment:
    """One message on its way into the channels to `receivers`; `posted` when its last chunk went or nobody is left."""

    def __init__(
        self, message: int, receivers: Sequence[str], priority: Priority, reply_to: int | None, frames: Sequence[Buffer]
    ) -> None:
        self.message, self.receivers, self.priority = message, list(receivers), priority
        self.bytes = bytes_of(frames)
        self.admitted = self.posted = False
        self._chunks = cut(message, reply_to, frames)
        self.chunk: Chunk | None = next(self._chunks)

    def advance(self) -> None:
        """Go on to the next chunk."""
        self.chunk = next(self._chunks, None)


@dataclass(frozen=True)
class Arrival:
    """A whole message; `frames` are its struct and its buffers."""

    header: wire.Header
    frames: list[memoryview]
    bytes: int
    stream: int
