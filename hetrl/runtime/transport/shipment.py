"""One message at the two ends of its way: as it goes into the channels, and as it comes out of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Buffer, Chunk, bytes_of, cut
from hetrl.runtime.wire import Priority


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
