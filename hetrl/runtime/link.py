"""The link from one site's gateway to another's: a stream for control messages and several for the rest.

ZeroMQ reconnects each stream by itself. Whether the other gateway is there is told by its answers to an echo every
second: when it has been silent for too long, the link gives up what it holds and refuses more, until it hears again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from hetrl.runtime import wire
from hetrl.runtime.keys import SiteKeys
from hetrl.runtime.lane import Attempt, Lane, Parcel
from hetrl.runtime.sockets import DOWN, QUEUE_MESSAGES, STREAM_QUEUE_MESSAGES, UP, Port, client_socket, watch

STREAMS = 4
ECHO_SECONDS = 1.0
_SMOOTHING = 1 / 8  # RFC 6298, section 2

_log = logging.getLogger(__name__)


class Link:
    """Sends parcels to the gateway of `peer`; times are those of the event loop's clock."""

    def __init__(
        self,
        site: str,
        peer: str,
        *,
        streams: int,
        lane_bytes: int,
        hold_seconds: float,
        patience_seconds: float,
    ) -> None:
        """Prepare a link that is not connected yet, and may stay so for `hold_seconds` at first."""
        self.peer = peer
        self.gone: str | None = None
        self._site, self._streams = site, streams
        self._hold_seconds, self._patience_seconds = hold_seconds, patience_seconds
        self._ports: list[Port] = []
        self._monitors: list[tuple[zmq.Socket[bytes], Port]] = []
        self._control = Lane(lambda parcel: self._attempt(parcel, self._ports[:1]), lane_bytes)
        self._bulk = Lane(lambda parcel: self._attempt(parcel, self._ports[1:]), lane_bytes)
        self._lost: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._round_trip_seconds: float | None = None
        self._echoed_seconds = self._echo_seconds = 0.0

    def open(
        self,
        context: zmq.Context[Any],
        keys: SiteKeys,
        endpoint: str,
        restored: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Connect; `restored` is told the peer whenever a stream that was lost is back."""
        self._echoed_seconds = _now()
        for number in range(1 + self._streams):
            queue = STREAM_QUEUE_MESSAGES if number else QUEUE_MESSAGES
            socket = client_socket(context, keys, keys.peers[self.peer], queue)
            self._ports.append(Port(socket, lambda frames: None, self.pump, failed=failed))
            told = self._teller(number, restored)
            self._monitors.append((socket, watch(socket, told, failed=failed)))
            socket.connect(endpoint)

    def _teller(self, number: int, restored: Callable[[str], None]) -> Callable[[int], None]:
        def told(event: int) -> None:
            if event == DOWN:
                self._lost.add(number)
                _log.info("%s: stream %d of the link to %s is down", self._site, number, self.peer)
            elif event == UP and number in self._lost:
                self._lost.discard(number)
                self._counts["reconnects"] += 1
                restored(self.peer)

        return told

    def offer(self, parcel: Parcel) -> str | None:
        """Queue a parcel; return why not where it is refused, None also for a chunk that is dropped and counted."""
        if self.gone is not None:
            return self.gone
        control = parcel.header.priority is wire.Priority.CONTROL
        if (self._control if control else self._bulk).offer(parcel):
            return None
        if control:
            return f"{self._site} -> {self.peer}: {self._control.bytes} bytes of control messages wait already"
        self._counts["chunks_dropped"] += 1
        return None

    def pump(self) -> None:
        """Send what waits."""
        if self.gone is None:
            self._control.pump()
            self._bulk.pump()

    def heard(self, size_bytes: int) -> None:
        """Count a message that came from the peer."""
        self._counts["messages_received"] += 1
        self._counts["bytes_received"] += size_bytes

    def echoed(self, sent_seconds: float) -> None:
        """Hear the answer to an echo: the link carries both ways, and this is how long it takes."""
        took, known = _now() - sent_seconds, self._round_trip_seconds
        self._round_trip_seconds = took if known is None else known + _SMOOTHING * (took - known)
        if self.gone is not None or known is None:
            _log.info("%s: the link to %s is up", self._site, self.peer)
        self._echoed_seconds, self.gone = _now(), None

    def tick(self, echo: Callable[[str, float], Sequence[Any]]) -> str | None:
        """Send an echo when it is time; return the cause when the link has just been given up."""
        now = _now()
        if now - self._echo_seconds >= ECHO_SECONDS:
            self._echo_seconds = now
            self._ports[0].send(echo(self.peer, now))
        patience = self._hold_seconds if self._round_trip_seconds is None else self._patience_seconds
        if self.gone is not None or now - self._echoed_seconds <= patience:
            return None
        self.gone = (
            f"{self._site} -> {self.peer}: no connection for {patience:g} s; look into the gateways' logs of both "
            "sites, and at what lies between them"
        )
        for lane in (self._control, self._bulk):
            lane.clear()
        _log.warning("%s", self.gone)
        return self.gone

    @property
    def settled(self) -> bool:
        """Whether waiting sends nothing more."""
        return not self._reachable or not (self._control or self._bulk)

    @property
    def _reachable(self) -> bool:
        return self._round_trip_seconds is not None and self.gone is None

    @property
    def queued_bytes(self) -> int:
        """Return the bytes that wait here."""
        return self._control.bytes + self._bulk.bytes

    def counters(self) -> wire.LinkCounters:
        """Return what crossed so far."""
        return wire.LinkCounters(
            **self._counts,
            seconds_sending=round(self._bulk.busy_seconds, 6),
            round_trip_seconds=self._round_trip_seconds,
        )

    def close(self, linger_seconds: float) -> None:
        """Close every stream; what it holds may still go for `linger_seconds` where the peer is there."""
        for socket, monitor in self._monitors:
            socket.disable_monitor()
            monitor.close(0)
        for port in self._ports:
            port.close(linger_seconds if self._reachable else 0.0)

    def _attempt(self, parcel: Parcel, ports: list[Port]) -> Attempt:
        """Hand a parcel to the next stream that has room."""
        for port in ports:
            if port.send(parcel.frames):
                self._counts["messages_sent"] += 1
                self._counts["bytes_sent"] += parcel.bytes
                if len(ports) > 1:  # the stream goes to the end of the turn
                    self._ports.remove(port)
                    self._ports.append(port)
                return Attempt.SENT
        return Attempt.BUSY


def _now() -> float:
    return asyncio.get_running_loop().time()
