"""The link from one site's gateway to another's: a stream for control messages and several for the rest.

Each stream comes back by itself:

    lost after it was up    ZeroMQ connects again at once
    ends before it is up    something answers that is not the gateway, such as an ssh tunnel without a gateway at its
                            end: the next attempt waits, each time longer

Whether the other gateway is there is told by its answers to an echo every two seconds, more often before the first one:

    silent for OUT_SECONDS      the link is out, as members are told; what is sent waits
    silent for REDIAL_SECONDS   its streams are dialled again: TCP knows only the next hop, a relay, proxy or tunnel
    silent beyond its patience  the link gives up what it holds; what is sent then is refused, unless the link is back
                                within KNOCK_SECONDS

A gateway that ends for good says so; its peers give the link up at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from hetrl.runtime import wire
from hetrl.runtime.gateway.link_report import LinkReport
from hetrl.runtime.transport.channel import smoothed
from hetrl.runtime.transport.lane import Attempt, Lane, Parcel, now
from hetrl.runtime.transport.pacing import pace_descriptor
from hetrl.runtime.transport.sockets import DOWN, QUEUE_MESSAGES, STREAM_QUEUE_MESSAGES, UP, Port, client_socket
from hetrl.runtime.wire.keys import SiteKeys

STREAMS = 4  # where packets are lost, one stream backs off for seconds and several do not
ECHO_SECONDS, FIRST_ECHO_SECONDS = 2.0, 0.2  # before the first answer nobody knows a link that goes out from one not up
OUT_SECONDS = 8.0  # before a rank behind the link counts as silent: it may have spoken last a beat before the link did
REDIAL_SECONDS = 15.0
STILL_SECONDS = 15.0  # a stream that carries nothing says so, before what lies between takes it for dead
KNOCK_SECONDS = 10.0  # a link that carries again is noticed within 5 s of pause and some round trips
# Of our own: ZeroMQ resets its pause at each connection that is taken, be it by a tunnel that leads nowhere.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0

_log = logging.getLogger(__name__)


class PeerLink:
    """Sends parcels to the gateway of `peer`; times are those of the event loop's clock."""

    def __init__(
        self, site: str, peer: str, *, streams: int, lane_bytes: int, hold_seconds: float, patience_seconds: float
    ) -> None:
        """Prepare a link that is not connected yet, and may stay so for `hold_seconds` at first."""
        self.peer = peer
        self.out = False
        self.gone: str | None = None  # why the link was given up
        self._cut_off: str | None = None
        self._knocked_seconds: float | None = None  # when something was first sent over a link that was given up
        self._site, self._count = site, streams
        self._hold_seconds, self._patience_seconds = hold_seconds, patience_seconds
        self._streams: list[Stream] = []  # the first is for control
        self._control = Lane(lambda parcel: self._attempt(parcel, self._streams[:1]), lane_bytes)
        self._bulk = Lane(lambda parcel: self._attempt(parcel, self._streams[1:]), lane_bytes)
        self._counts: Counter[str] = Counter()
        self._round_trip_seconds: float | None = None
        self._echoed_seconds = self._echo_seconds = self._dialled_seconds = 0.0

    def open(
        self,
        context: zmq.Context[Any],
        keys: SiteKeys,
        endpoint: str,
        tell_members: Callable[[wire.Message], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Connect; members are told when the link is out, and whenever it or a stream of it that was lost is back.

        A stream that is back says nothing of the way from there to here: a link that was out is back once an echo is
        answered, which is asked for at once.
        """
        self._echoed_seconds, self._tell_members = now(), tell_members

        def came_back() -> None:
            self._counts["reconnects"] += 1
            self._echo_seconds = 0.0
            if not self.out and self.gone is None:
                tell_members(wire.LinkRestored(site=self.peer))

        for number in range(1 + self._count):
            queue = STREAM_QUEUE_MESSAGES if number else QUEUE_MESSAGES
            socket = client_socket(context, keys, keys.peers[self.peer], queue)
            # What waits for a connection waits in the lanes, which are counted and bounded.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            report = LinkReport(f"{self._site} -> {self.peer} stream {number}")
            self._streams.append(Stream(socket, endpoint, report, self.pump, came_back, failed))

    def offer(self, parcel: Parcel) -> str | None:
        """Queue a parcel; return why not where it is refused, None also for a chunk that is dropped and counted."""
        if self._cut_off is not None:
            return self._cut_off
        if self.gone is not None and self._knocked_seconds is None:
            self._knocked_seconds = now()
        control = parcel.header.priority is wire.Priority.CONTROL
        if (self._control if control else self._bulk).offer(parcel):
            return None
        if control:
            return f"{self._site} -> {self.peer}: {self._control.bytes} bytes of control messages wait already"
        self._counts["chunks_dropped"] += 1
        return None

    def pump(self) -> None:
        """Send what waits."""
        self._control.pump()
        self._bulk.pump()

    def heard(self, size_bytes: int) -> None:
        """Count a message that came from the peer."""
        self._counts["messages_received"] += 1
        self._counts["bytes_received"] += size_bytes

    def echoed(self, sent_seconds: float) -> None:
        """Hear the answer to an echo: the link carries both ways, and this is how long it takes."""
        known = self._round_trip_seconds
        self._round_trip_seconds = smoothed(known, now() - sent_seconds)
        if self.gone is not None or known is None:
            _log.info("%s: the link to %s is up", self._site, self.peer)
        was_out = self.out or self.gone is not None
        self._carries()
        if was_out:
            self._tell_members(wire.LinkRestored(site=self.peer))

    def _carries(self) -> None:
        """Know that the other gateway is there."""
        if self._cut_off is None:
            self._echoed_seconds, self.out, self.gone, self._knocked_seconds = now(), False, None, None

    def answer(self, frames: Sequence[Any]) -> None:
        """Send the answer to an echo if the connection takes it now, on a link that was given up, too.

        Where both sides have given a link up, these answers are how they learn that it carries again.
        """
        self._streams[0].send(frames)

    def tick(self, to_gateway: Callable[[str, wire.Message], Sequence[Any]]) -> None:
        """Send signs of life when it is time; see whether the link is out, or has been for too long.

        `to_gateway` makes the frames of a message to the gateway of a site.
        """
        seconds, known = now(), self._round_trip_seconds is not None
        if seconds - self._echo_seconds >= (ECHO_SECONDS if known else FIRST_ECHO_SECONDS):
            echo = to_gateway(self.peer, wire.Echo(seconds=seconds))
            if self._streams[0].send(echo):
                self._echo_seconds = seconds
        for stream in self._streams[1:]:
            if seconds - stream.sent_seconds >= STILL_SECONDS:
                stream.send(to_gateway(self.peer, wire.Heartbeat()))
        silent_seconds = seconds - self._echoed_seconds
        if min(silent_seconds, seconds - self._dialled_seconds) > REDIAL_SECONDS:
            self._dialled_seconds = seconds
            for stream in self._streams:
                stream.redial()
        if known and not self.out and self.gone is None and silent_seconds > OUT_SECONDS:
            self.out = True
            _log.warning("%s -> %s: no answer for %g s; what is sent waits", self._site, self.peer, OUT_SECONDS)
            self._tell_members(wire.LinkOut(site=self.peer))
        patience = self._patience_seconds if known else self._hold_seconds
        if self.gone is None and silent_seconds > patience:
            cause = (
                f"{self._site} -> {self.peer}: no connection for {patience:g} s; look into the gateways' logs of both "
                "sites, and at what lies between them"
            )
            self._give_up(cause, wire.Undeliverable(receiver=self.peer, cause=cause))

    def ended(self) -> None:
        """Hear that the other gateway has ended for good, which is said once."""
        if self.gone is None:
            cause = f"{self._site} -> {self.peer}: the gateway there has ended"
            self._give_up(cause, wire.GatewayEnded(site=self.peer))

    def _give_up(self, cause: str, told: wire.Message) -> None:
        _log.warning("%s", cause)
        self.gone = cause
        self._clear()
        self._tell_members(told)

    def overdue(self) -> tuple[list[Parcel], str]:
        """Return what was sent in vain since the link was given up, and why; nothing while it may be coming back."""
        if self.gone is None or self._knocked_seconds is None or now() - self._knocked_seconds <= KNOCK_SECONDS:
            return [], ""
        self._knocked_seconds = None
        return self._clear(), self.gone

    def cut_off(self, cause: str) -> None:
        """Drop what waits, and refuse more for good."""
        self._cut_off = self.gone = cause
        self._clear()

    def _clear(self) -> list[Parcel]:
        return [*self._control.clear(), *self._bulk.clear()]

    @property
    def settled(self) -> bool:
        """Whether waiting sends nothing more."""
        return not self._reachable or not (self._control or self._bulk)

    @property
    def _reachable(self) -> bool:
        return self._round_trip_seconds is not None and self.gone is None

    def counters(self) -> wire.LinkCounters:
        """Return what crossed so far."""
        return wire.LinkCounters(
            **self._counts,
            peak_queued_bytes=self._control.peak_bytes + self._bulk.peak_bytes,
            seconds_sending=round(self._bulk.busy_seconds, 6),
            round_trip_seconds=self._round_trip_seconds,
        )

    def close(self, linger_seconds: float) -> None:
        """Close every stream; what it holds may still go for `linger_seconds` where the peer is there."""
        for stream in self._streams:
            stream.close(linger_seconds if self._reachable else 0.0)

    def _attempt(self, parcel: Parcel, streams: list[Stream]) -> Attempt:
        """Hand a parcel to the next stream that has room."""
        for stream in streams:
            if stream.send(parcel.frames):
                self._counts["messages_sent"] += 1
                self._counts["bytes_sent"] += parcel.bytes
                if len(streams) > 1:  # the stream goes to the end of the turn
                    self._streams.remove(stream)
                    self._streams.append(stream)
                return Attempt.SENT
        return Attempt.BUSY


class Stream:
    """One connection of a link: sends over a DEALER to `endpoint`; the log has each change of `report`'s link once."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        report: LinkReport,
        pump: Callable[[], object],
        restored: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Connect; `pump` is called when there may be room, `restored` when a connection that was up is up again."""
        self._socket, self._endpoint, self._report, self._restored = socket, endpoint, report, restored
        self.sent_seconds = 0.0
        self._is_up = self._was_up = self._troubled = False
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._attempt: asyncio.TimerHandle | None = None
        self._port = Port(
            socket, lambda frames: None, pump, changed=self._changed, connected=pace_descriptor, failed=failed
        )
        socket.connect(endpoint)

    def send(self, frames: Sequence[Any]) -> bool:
        """Hand a message to the connection if it can take it now."""
        sent = self._port.send(frames)
        if sent:
            self.sent_seconds = now()
        return sent

    def redial(self) -> None:
        """Leave a connection that is up, with what it holds, for another one."""
        if self._is_up:
            self._is_up = False
            self._trouble("the other gateway does not answer")
            self._dial_again()

    def close(self, linger_seconds: float) -> None:
        """Close; what the connection holds may still go for `linger_seconds`."""
        if self._attempt is not None:
            self._attempt.cancel()
        self._port.close(linger_seconds)

    def _changed(self, event: int) -> None:
        if event == UP:
            self._is_up, self._pause_seconds = True, FIRST_PAUSE_SECONDS
            if self._troubled:
                self._report.up()
            if self._was_up:
                self._restored()
            self._was_up = True
        elif event == DOWN and self._is_up:
            self._is_up = False
            self._trouble("the connection was lost")
        elif event == DOWN and self._attempt is None:
            self._trouble("connections end before the other gateway answers")
            self._dial_again()

    def _dial_again(self) -> None:
        """Disconnect now, and connect after a pause."""
        self._socket.disconnect(self._endpoint)
        self._port.look()
        self._attempt = asyncio.get_running_loop().call_later(self._pause_seconds, self._try_again)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def _trouble(self, what: str) -> None:
        self._troubled = True
        self._report.down(what)

    def _try_again(self) -> None:
        self._attempt = None
        self._socket.connect(self._endpoint)
        self._port.look()
