"""The gateway of one site: the only process there that speaks to other sites.

    member --> ROUTER of its site --one copy per site--> ROUTER of the other site --> each receiver there

A gateway routes and forgets (`delivery`). It never stops reading, so that no two sites can wait for each other; what
it cannot hold it drops, and the members see to it that everything arrives once and in order (`transport.exchange`).

It knows who takes part in the run. From another site it takes what a member there says to members here, and nothing
else; a site that sends something else time and again is cut off.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import zmq

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.gateway.delivery import Delivery
from hetrl.runtime.gateway.peer_link import STREAMS, PeerLink
from hetrl.runtime.gateway.zap import ZapHandler
from hetrl.runtime.transport.chunks import bytes_of
from hetrl.runtime.transport.endpoints import listen
from hetrl.runtime.transport.lane import Attempt, now
from hetrl.runtime.transport.offences import Offences
from hetrl.runtime.transport.sockets import ACCEPTED, UP, Port, server_socket
from hetrl.runtime.wire import gateway_of
from hetrl.runtime.wire.authority import OfTheTable
from hetrl.runtime.wire.keys import SiteKeys

HOLD_SECONDS = 300.0  # engines take minutes to come up, in any order
PATIENCE_SECONDS = 600.0
# The windows of eight senders. A lane that is full drops chunks, which their senders send again.
LANE_BYTES = 512 * 2**20
_TICK_SECONDS = 0.1

_log = logging.getLogger(__name__)


class Gateway:
    """Hands messages from members of `site` to members anywhere in `run`; `serve` does the work.

    `members` are the addresses that there are, beside those of the gateways. `peers` are the endpoints of the other
    sites' gateways; each is reached by one connection for control and `STREAMS` for the rest, unless `streams`
    names another number. In `directory`, of mode 0700, members of this node find a unix socket. Messages for a
    member or a site that is not up yet are held for `hold_seconds`; a site that was up and does not answer for its
    `patience_seconds` (else `PATIENCE_SECONDS`) is given up until it does. At most `lane_bytes` of control messages
    and as much of the rest wait for each destination. `serve` ends with a HetrlError where nothing of a controller was
    heard for `orphan_seconds`, behind `hold_seconds` until its first word.
    """

    def __init__(
        self,
        site: str,
        run: str,
        bind_endpoint: str,
        peers: Mapping[str, str],
        keys: SiteKeys,
        members: Container[str],
        *,
        directory: Path | None = None,
        hold_seconds: float = HOLD_SECONDS,
        patience_seconds: Mapping[str, float] = MappingProxyType({}),
        streams: Mapping[str, int] = MappingProxyType({}),
        lane_bytes: int = LANE_BYTES,
        orphan_seconds: float = math.inf,
    ) -> None:
        strangers = sorted(set(peers) - set(keys.peers) - {site})
        if strangers or keys.site != site:
            raise HetrlError(f"{site}: the key file of {keys.site} does not fit (no key of {strangers}); submit again")
        self.site, self.address = site, gateway_of(site)
        self.not_admitted = 0
        self._run, self._keys, self._members = run, keys, members
        self._bind_endpoint, self._directory = bind_endpoint, directory
        self._endpoints = {peer: endpoint for peer, endpoint in peers.items() if peer != site}
        links = {
            peer: PeerLink(
                site,
                peer,
                streams=streams.get(peer, STREAMS),
                lane_bytes=lane_bytes,
                hold_seconds=hold_seconds,
                patience_seconds=patience_seconds.get(peer, PATIENCE_SECONDS),
            )
            for peer in self._endpoints
        }
        self._hold_seconds = hold_seconds
        self._delivery = Delivery(
            site, run, members, links, self._send, hold_seconds=hold_seconds, lane_bytes=lane_bytes
        )
        self._authority, self._offences = OfTheTable(), Offences(self.address, self._cut_off)
        self._zap = ZapHandler(site, keys.site_by_key())
        self._orphan_seconds, self._last_word = orphan_seconds, 0.0  # of the controller
        self._stop, self._for_good = asyncio.Event(), False
        self._defect: BaseException | None = None

    async def serve(self) -> None:
        """Work until `stop`; then send what is queued for at most 2 s. Raises HetrlError when the port is taken.

        Stopped for good, it tells the other gateways.
        """
        context: zmq.Context[Any] = zmq.Context(io_threads=2)  # they do CURVE for every byte between sites
        self._zap.open(context, failed=self._fail)
        socket = server_socket(context, self._keys)
        self._router = Port(socket, self._hear, self._delivery.pump, changed=self._count_connection, failed=self._fail)
        linger_seconds, unix_socket = 0.0, None
        try:
            unix_socket = listen(socket, self.site, self._bind_endpoint, self._directory)
            for peer, link in self._delivery.links.items():
                link.open(context, self._keys, self._endpoints[peer], self._delivery.tell_members, self._fail)
            _log.info("%s: the gateway listens on %s", self.site, self._bind_endpoint)
            await self._tick_until_stopped()
            if self._defect is not None:
                raise self._defect
            if self._for_good:
                for peer in self._delivery.links:
                    self._delivery.say(gateway_of(peer), wire.GatewayEnded(site=self.site))
            linger_seconds = await self._delivery.drain()
        finally:
            if unix_socket is not None:
                unix_socket.unlink(missing_ok=True)

            for link in self._delivery.links.values():
                link.close(linger_seconds)
            self._router.close(linger_seconds)
            self._zap.close()
            await asyncio.to_thread(context.term)  # it waits for what lingers

    def stop(self, *, for_good: bool = True) -> None:
        """Make `serve` drain and return; `for_good` says that no other process will be the gateway of this site."""
        self._for_good = for_good
        self._stop.set()

    def stats(self) -> wire.LinkStatsReply:
        """Return what crossed the links, and what did not, so far."""
        links, seats = self._delivery.links, self._delivery.seats.values()
        offences = sum((Counter(seat.hello.offences) for seat in seats), self._offences.counts)
        return wire.LinkStatsReply(
            links={peer: link.counters() for peer, link in links.items()},
            refused=self._zap.refused,
            malformed=offences.total(),
            offences=dict(offences),
            not_admitted=self.not_admitted,
            chunks_dropped=sum(seat.chunks_dropped for seat in seats),
            chunks_resent=sum(seat.hello.chunks_resent for seat in seats),
            chunks_duplicate=sum(seat.hello.chunks_duplicate for seat in seats),
            peak_queued_bytes={seat.address: seat.peak_queued_bytes for seat in seats if seat.peak_queued_bytes},
        )

    def _fail(self, defect: BaseException) -> None:
        self._defect = defect
        self._stop.set()

    def _count_connection(self, event: int) -> None:
        if event == ACCEPTED:
            self.not_admitted += 1
        elif event == UP:
            self.not_admitted -= 1

    # ---- from members and other gateways

    def _hear(self, frames: list[zmq.Frame]) -> None:
        identity, *rest = frames
        self.hear(str(rest[0].get("User-Id")), identity.bytes, rest)

    def hear(self, origin: str, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Take one message that came with the key of the site `origin`."""
        if self._offences.cause(origin) is not None:
            return
        try:
            self._admit(identity, frames, origin)
        except (msgspec.MsgspecError, ValueError, LookupError) as error:
            self._offences.add(origin, error, forgiven=origin == self.site)

    def _admit(self, identity: bytes, frames: Sequence[zmq.Frame], origin: str) -> None:
        """Take one message from a member of this site or from another gateway; raises ValueError on a bad one."""
        header = wire.decode_header(frames[0].buffer)
        if header.run != self._run or wire.site_of(header.source) != origin or not header.to or len(frames) < 2:
            raise ValueError(f"from {header.source} of run {header.run} with the key of {origin}")
        if header.source != gateway_of(origin) and header.source not in self._members:
            raise ValueError(f"from {header.source}, who is no member of the run")
        if wire.role_of(header.source) == wire.CONTROLLER:
            self._last_word = now()
        if origin != self.site:
            self._delivery.links[origin].heard(bytes_of(frames))
            here = [one for one in header.to if wire.site_of(one) == self.site and one != self.address]
            strangers = [one for one in here if one not in self._members]
            if strangers:
                raise ValueError(f"from {header.source} to {strangers[0]}, who is no member of the run")
        if self.address in header.to:
            self._answer(header, wire.decode_message(frames[1].buffer), identity)
        self._delivery.route(header, frames, origin)

    def _cut_off(self, site: str, cause: str) -> None:
        """Give up a site of which nothing is heard any more."""
        self._delivery.links[site].cut_off(cause)
        self._delivery.tell_members(wire.Undeliverable(receiver=site, cause=cause))

    def _answer(self, header: wire.Header, message: wire.Message, identity: bytes) -> None:
        """Do what a message to the gateway itself asks; raises ValueError where its source may not."""
        if refusal := self._authority.refusal(message, header, self.address):
            raise ValueError(refusal)
        match message:
            case wire.Hello():
                self._greet(header.source, message, identity)
            case wire.Echo(seconds=seconds):
                reply = wire.encode(self._delivery.header(header.source), wire.EchoReply(seconds=seconds))
                self._delivery.links[wire.site_of(header.source)].answer(reply)
            case wire.EchoReply(seconds=seconds):
                self._delivery.links[wire.site_of(header.source)].echoed(seconds)
            case wire.GatewayEnded(site=site):
                if site != wire.site_of(header.source):
                    raise ValueError(f"{header.source} says that the gateway of {site} has ended")
                self._delivery.links[site].ended()
            case wire.LinkStats():
                self._delivery.say(header.source, self.stats(), reply_to=header.id)

    def _greet(self, address: str, hello: wire.Hello, identity: bytes) -> None:
        seat = self._delivery.seat(address)
        known = seat.connected
        other = seat.greet(hello, identity)
        if seat.connected and not known:
            _log.info("%s: %s is connected", self.site, address)
        if other:  # a member that was started again, or has lost what this one said before
            for peer, link in self._delivery.links.items():
                if link.out:
                    self._delivery.say(address, wire.LinkOut(site=peer))
                if link.gone is not None:
                    self._delivery.say(address, wire.Undeliverable(receiver=peer, cause=link.gone))

    def _send(self, frames: Sequence[Any]) -> Attempt:
        """Hand frames to the ROUTER, which tells who is gone."""
        try:
            return Attempt.SENT if self._router.send(frames) else Attempt.BUSY
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return Attempt.LOST

    async def _tick_until_stopped(self) -> None:
        self._last_word = now() + self._hold_seconds
        while not self._stop.is_set():
            self._delivery.tick()
            if now() - self._last_word > self._orphan_seconds:
                silence = f"no word of the controller for {self._orphan_seconds:g} s (launch.orphan_timeout)"
                self._fail(HetrlError(f"{self.site}: {silence}, so the gateway ends"))
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._stop.wait()
