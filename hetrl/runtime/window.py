"""A sender's view of what its receivers have yet to take: the bound on memory along the way.

    send of n bytes to R:  wait until, for each receiver in R, nothing is open or open + n <= limit; then open += n
    receiver took it:      open -= n, and whoever waits looks again

So at most `limit` bytes (or one larger message) are under way between a sender and a receiver, in whatever queue, and
no queue between them ever has to stop reading: two sites that fill each other's link cannot block each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence


class Window:
    """Bytes under way to each receiver, at most `limit_bytes` for each."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._open_bytes: Counter[str] = Counter()
        self._messages: dict[tuple[int, str], int] = {}
        self._changed = asyncio.Event()

    def full(self, receivers: Sequence[str], size_bytes: int) -> tuple[str, ...]:
        """Return the receivers that must take something before `size_bytes` more may go."""
        return tuple(
            receiver
            for receiver in receivers
            if self._open_bytes[receiver] and self._open_bytes[receiver] + size_bytes > self._limit_bytes
        )

    def open(self, message: int, receivers: Sequence[str], size_bytes: int) -> None:
        """Count a message of `size_bytes` as under way."""
        for receiver in receivers:
            self._messages[message, receiver] = size_bytes
            self._open_bytes[receiver] += size_bytes

    def close(self, message: int, receiver: str) -> None:
        """Count a message as taken (or lost); one that is not under way changes nothing."""
        self._open_bytes[receiver] -= self._messages.pop((message, receiver), 0)
        self.wake()

    def wake(self) -> None:
        """Let everybody who waits in `changed` look again."""
        self._changed.set()

    async def changed(self) -> None:
        """Return after the next `close` or `wake`."""
        self._changed.clear()
        await self._changed.wait()
