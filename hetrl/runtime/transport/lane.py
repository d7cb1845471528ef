"""A bounded queue towards one destination: data goes ahead of weights, but every eighth turn is theirs.

Weights that give way go when no other weights wait, and in every eighth of their turns; the background when nothing
else waits.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from hetrl.runtime.transport.chunks import bytes_of
from hetrl.runtime.wire import Header, Place, Priority, encode_struct

_WEIGHTS_TURN = 8  # the others belong to data first: weights shall not starve, nor hold it up


@dataclass(frozen=True)
class Parcel:
    """A message or chunk on its way to `receivers`, which one destination holds; `bytes` of all its frames."""

    header: Header
    frames: Sequence[Any]
    receivers: tuple[str, ...]
    bytes: int


def parcel_for(
    header: Header, places: Mapping[str, Place], frames: Sequence[Any], receivers: tuple[str, ...]
) -> Parcel:
    """Return what goes to some receivers of a message: its header names them alone, lest each reads of a thousand.

    A chunk has `places`, by receiver.
    """
    if receivers != header.to:
        header = replace(header, to=receivers, places=tuple(places[one] for one in receivers if places))
        frames = [encode_struct(header), *frames[1:]]
    return Parcel(header, frames, receivers, bytes_of(frames))


class Attempt(enum.Enum):
    """How it went to hand a parcel to a socket."""

    SENT = enum.auto()
    BUSY = enum.auto()
    LOST = enum.auto()  # the destination was connected and is not
    ABSENT = enum.auto()  # it never was


class Lane:
    """What waits for one destination, and the most that ever did; `attempt` hands a parcel to a socket at once."""

    def __init__(self, attempt: Callable[[Parcel], Attempt], limit_bytes: int | None = None) -> None:
        self._attempt, self._limit_bytes = attempt, limit_bytes
        self._queues: tuple[deque[Parcel], ...] = tuple(deque() for _ in Priority)
        control, data, weights, later, background = self._queues
        self._orders = (
            (control, data, weights, later, background),
            (control, weights, later, data, background),
            (control, later, weights, data, background),
        )
        self._turn = 0
        self._busy_since: float | None = None
        self._busy_seconds = 0.0
        self.bytes = self.peak_bytes = 0

    def __bool__(self) -> bool:
        return any(self._queues)

    def offer(self, parcel: Parcel) -> bool:
        """Queue a parcel and send what can be sent; return False where the lane is too full for it."""
        if self._limit_bytes is not None and self.bytes + parcel.bytes > self._limit_bytes:
            return False
        if self._busy_since is None:
            self._busy_since = now()
        self._queues[parcel.header.priority].append(parcel)
        self.bytes += parcel.bytes
        self.pump()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return True

    def pump(self) -> Attempt:
        """Send until nothing is left (SENT) or the destination takes nothing more now."""
        while (queue := self._next()) is not None:
            attempt = self._attempt(queue[0])
            if attempt is not Attempt.SENT:
                return attempt
            self._turn += 1
            self.bytes -= queue.popleft().bytes
        self._rest()
        return Attempt.SENT

    def clear(self) -> list[Parcel]:
        """Empty the lane and return what was in it."""
        parcels = [parcel for queue in self._queues for parcel in queue]
        for queue in self._queues:
            queue.clear()
        self.bytes = 0
        self._rest()
        return parcels

    @property
    def busy_seconds(self) -> float:
        """Return for how long in all there was something in the lane."""
        return self._busy_seconds + (0.0 if self._busy_since is None else now() - self._busy_since)

    def _next(self) -> deque[Parcel] | None:
        # The first order; in every eighth turn the second; in every eighth of those the third.
        order = self._orders[(self._turn % _WEIGHTS_TURN == 0) + (self._turn % _WEIGHTS_TURN**2 == 0)]
        return next(filter(None, order), None)

    def _rest(self) -> None:
        self._busy_seconds, self._busy_since = self.busy_seconds, None


def now() -> float:
    """Return the seconds of the event loop's clock."""
    return asyncio.get_running_loop().time()
