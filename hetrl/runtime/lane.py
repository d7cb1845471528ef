"""A bounded queue towards one destination of a gateway: a member of its site, or another site.

until the parcel is sent:
    destination away for longer than it may be: refuse the parcel
    destination away or busy: try again soon
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hetrl.runtime.wire import Header

LANE_MESSAGES = 20_000
# More than the windows of 60 senders; a lane that holds so much has lost its senders' windows.
LANE_BYTES = 4 * 2**30
RECONNECT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05


@dataclass(frozen=True)
class Parcel:
    """A message on its way to `receivers`, which one destination holds; `bytes` of all its frames."""

    header: Header
    frames: Sequence[Any]
    receivers: tuple[str, ...]
    bytes: int
    arrived_seconds: float


class Attempt(enum.Enum):
    """How it went to hand a parcel to a socket."""

    SENT = enum.auto()
    BUSY = enum.auto()
    LOST = enum.auto()  # the destination was connected and is not
    ABSENT = enum.auto()  # it never was


class Lane:
    """What waits for one destination, in order.

    `attempt` tries to send without waiting; `refuse` tells the source why not. A destination that never connected is
    waited for `hold_seconds`, one that was lost for `RECONNECT_SECONDS` if that is less.
    """

    def __init__(
        self,
        destination: str,
        attempt: Callable[[Parcel], Awaitable[Attempt]],
        refuse: Callable[[Parcel, str], None],
        hold_seconds: float,
    ) -> None:
        self._destination = destination
        self._attempt = attempt
        self._refuse = refuse
        self._patience_seconds = {
            Attempt.ABSENT: hold_seconds,
            Attempt.LOST: min(hold_seconds, RECONNECT_SECONDS),
        }
        self._queue: asyncio.Queue[Parcel] = asyncio.Queue()
        self._messages = self._bytes = 0
        self._absent_since: float | None = None

    @property
    def settled(self) -> bool:
        """Whether waiting sends nothing more: the lane is empty, the parcel in hand included, or leads nowhere."""
        return self._messages == 0 or self._absent_since is not None

    def offer(self, parcel: Parcel) -> None:
        """Queue a parcel; a full lane refuses it."""
        if self._messages >= LANE_MESSAGES or self._bytes + parcel.bytes > LANE_BYTES:
            self._refuse(parcel, f"{self._messages} messages wait for {self._destination} already")
            return
        self._messages += 1
        self._bytes += parcel.bytes
        self._queue.put_nowait(parcel)

    async def pump(self) -> None:
        """Send what is queued, for as long as the gateway lives."""
        while True:
            parcel = await self._queue.get()
            await self._deliver(parcel)
            self._messages -= 1
            self._bytes -= parcel.bytes

    async def _deliver(self, parcel: Parcel) -> None:
        """Send or refuse one parcel. No socket tells when one pipe of a ROUTER has room, so this asks again."""
        pause_seconds = _FIRST_PAUSE_SECONDS
        while (attempt := await self._attempt(parcel)) is not Attempt.SENT:
            if attempt is Attempt.BUSY:
                self._absent_since = None
            elif self._absent_seconds(parcel) > (patience := self._patience_seconds[attempt]):
                self._refuse(parcel, f"{self._destination} has not been connected for {patience:g} s")
                return
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        self._absent_since = None

    def _absent_seconds(self, parcel: Parcel) -> float:
        """Return for how long the parcel has been here while the destination was not."""
        now = asyncio.get_running_loop().time()
        if self._absent_since is None:
            self._absent_since = now
        return now - max(self._absent_since, parcel.arrived_seconds)
