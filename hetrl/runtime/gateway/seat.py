"""A member's place at its gateway: its two connections and what waits for it.

A member that was never there is waited for as long as the gang may take to come up, one that was lost much less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetrl.runtime.transport.lane import Attempt, Lane, Parcel, now
from hetrl.runtime.wire import Hello, Priority

RECONNECT_SECONDS = 10.0  # ZeroMQ tries again after 2 s at most


class Seat:
    """Sends parcels to one member; `send` hands frames to the gateway's ROUTER."""

    def __init__(
        self, address: str, send: Callable[[Sequence[Any]], Attempt], *, lane_bytes: int, hold_seconds: float
    ) -> None:
        self.address = address
        self.hello = Hello(bulk=False)
        self.chunks_dropped = 0
        self._send, self._hold_seconds = send, hold_seconds
        self._identities: dict[bool, bytes] = {}
        self._lanes = {bulk: Lane(self._attempt_of(bulk), lane_bytes) for bulk in (False, True)}
        self._away_since: float | None = None
        self._patience_seconds = hold_seconds

    @property
    def connected(self) -> bool:
        """Whether the member has said hello on both connections."""
        return len(self._identities) == 2

    def greet(self, hello: Hello, identity: bytes) -> bool:
        """Know one connection of the member, and send what waited for it; return whether it is another one."""
        other = self._identities.get(hello.bulk) != identity
        self._identities[hello.bulk] = identity
        if not hello.bulk:
            self.hello = hello
        self._away_since = None
        self.pump()
        return other

    def offer(self, parcel: Parcel) -> str | None:
        """Queue a parcel; return why not where it is refused, None also for a chunk that is dropped and counted."""
        bulk = parcel.header.priority is not Priority.CONTROL
        if self._lanes[bulk].offer(parcel):
            return None
        if not bulk:
            return f"{self._lanes[bulk].bytes} bytes of control messages wait for {self.address} already"
        self.chunks_dropped += 1
        return None

    def pump(self) -> None:
        """Send what waits."""
        for lane in filter(None, self._lanes.values()):
            lane.pump()

    def overdue(self) -> tuple[list[Parcel], str]:
        """Return what waited in vain for the member, and why; nothing while there is hope."""
        if self._away_since is None or now() - self._away_since <= self._patience_seconds:
            return [], ""
        parcels = [parcel for lane in self._lanes.values() for parcel in lane.clear()]
        return parcels, f"{self.address} has not been connected for {self._patience_seconds:g} s"

    @property
    def waits(self) -> bool:
        """Whether something waits for the member."""
        return any(self._lanes.values())

    @property
    def settled(self) -> bool:
        """Whether waiting sends nothing more."""
        return self._away_since is not None or not self.waits

    @property
    def peak_queued_bytes(self) -> int:
        """Return the most bytes that ever waited, in each lane at its own time."""
        return sum(lane.peak_bytes for lane in self._lanes.values())

    def _attempt_of(self, bulk: bool) -> Callable[[Parcel], Attempt]:
        def attempt(parcel: Parcel) -> Attempt:
            identity = self._identities.get(bulk)
            outcome = Attempt.ABSENT if identity is None else self._send([identity, *parcel.frames])
            if outcome in (Attempt.ABSENT, Attempt.LOST):
                self._away(outcome)
            else:
                self._away_since = None
            return outcome

        return attempt

    def _away(self, outcome: Attempt) -> None:
        if self._away_since is None:
            self._away_since = now()
            lost = outcome is Attempt.LOST
            self._patience_seconds = min(self._hold_seconds, RECONNECT_SECONDS) if lost else self._hold_seconds
