"""Where a gateway's messages go: once to each other site, once to each receiver of its own."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from hetrl.runtime import wire
from hetrl.runtime.gateway.peer_link import PeerLink
from hetrl.runtime.gateway.seat import Seat
from hetrl.runtime.transport.lane import Attempt, Parcel, now, parcel_for
from hetrl.runtime.transport.sockets import LINGER_SECONDS
from hetrl.runtime.wire import NO_ANSWER, gateway_of

_log = logging.getLogger(__name__)


class Delivery:
    """The links to the other sites and the seats of the members here, and what waits for each of them.

    What will never arrive comes back to its source as `Undeliverable`.
    """

    def __init__(
        self,
        site: str,
        run: str,
        members: Container[str],
        links: Mapping[str, PeerLink],
        send: Callable[[Sequence[Any]], Attempt],
        *,
        hold_seconds: float,
        lane_bytes: int,
    ) -> None:
        """Know `members` of the run and the `links` by site; `send` hands frames to the ROUTER of this site."""
        self.links, self.seats = links, dict[str, Seat]()
        self._site, self._address = site, gateway_of(site)
        self._run, self._members, self._send = run, members, send
        self._hold_seconds, self._lane_bytes = hold_seconds, lane_bytes
        self._refusals: Counter[str] = Counter()
        self._behind = set[Seat]()  # those for which something waits

    def route(self, header: wire.Header, frames: Sequence[Any], origin: str) -> None:
        """Queue a message once per other site and once per receiver here."""
        places = dict(zip(header.to, header.places, strict=True)) if header.places else {}
        for site, receivers in wire.by_site(tuple(dict.fromkeys(header.to))).items():
            if site == self._site:
                groups: list[tuple[str, ...]] = [(receiver,) for receiver in receivers if receiver != self._address]
            else:
                # What came from another site went from there to each site among its receivers.
                groups = [receivers] if origin == self._site else []
            for group in groups:
                self._offer(site, parcel_for(header, places, frames, group))

    def _offer(self, site: str, parcel: Parcel) -> None:
        strangers = [one for one in parcel.receivers if one != gateway_of(site) and one not in self._members]
        if strangers or not (site == self._site or site in self.links):
            cause: str | None = f"{', '.join(strangers) or site} is no member of this run"
        elif site == self._site:
            seat = self.seat(parcel.receivers[0])
            cause = seat.offer(parcel)
            if seat.waits:
                self._behind.add(seat)
        else:
            cause = self.links[site].offer(parcel)
        if cause is not None:
            self._refuse(parcel, cause)

    def _refuse(self, parcel: Parcel, cause: str) -> None:
        """Tell the source of a parcel that it was not handed over."""
        header = parcel.header
        if header.id == NO_ANSWER:
            return
        self._refusals[header.source] += 1
        if (number := self._refusals[header.source]).bit_count() == 1:  # the first, second, fourth, ...: no flood
            receivers = ", ".join(parcel.receivers)
            _log.warning("%s: %s to %s refused (%d): %s", self._site, header.source, receivers, number, cause)
        for receiver in parcel.receivers:
            undeliverable = wire.Undeliverable(receiver=receiver, cause=f"{self._address}: {cause}")
            self.say(header.source, undeliverable, reply_to=header.id)

    def say(self, to: str, message: wire.Message, reply_to: int | None = None) -> None:
        """Send a message of the gateway's own."""
        header = self.header(to, reply_to)
        self.route(header, wire.encode(header, message), self._site)

    def header(self, to: str, reply_to: int | None = None) -> wire.Header:
        """Return the header of a message of the gateway's own, which asks for no answer."""
        return wire.Header(run=self._run, source=self._address, to=(to,), id=NO_ANSWER, reply_to=reply_to)

    def seat(self, address: str) -> Seat:
        """Return the place of a member of this site, made where it has none yet."""
        if address not in self.seats:
            self.seats[address] = Seat(
                address, self._send, lane_bytes=self._lane_bytes, hold_seconds=self._hold_seconds
            )
        return self.seats[address]

    def pump(self) -> None:
        """Send to the members here what waits for them."""
        for seat in tuple(self._behind):
            seat.pump()
            if not seat.waits:
                self._behind.discard(seat)

    def tell_members(self, message: wire.Message) -> None:
        """Send every member here a message of the gateway's own."""
        for address, seat in list(self.seats.items()):
            if seat.connected:
                self.say(address, message)

    def tick(self) -> None:
        """Give the links their time, refuse what waited in vain, and send what waits."""
        for link in self.links.values():
            link.tick(self._to_gateway)
        destinations: list[PeerLink | Seat] = [*self.links.values(), *self.seats.values()]
        for destination in destinations:
            parcels, cause = destination.overdue()
            for parcel in parcels:
                self._refuse(parcel, cause)
        self.pump()

    def _to_gateway(self, peer: str, message: wire.Message) -> Sequence[Any]:
        return wire.encode(self.header(gateway_of(peer)), message)

    async def drain(self) -> float:
        """Let the lanes empty themselves; return what is left of `LINGER_SECONDS` for the sockets."""
        links, seats, deadline = self.links.values(), self.seats.values(), now() + LINGER_SECONDS
        while now() < deadline and not (all(link.settled for link in links) and all(seat.settled for seat in seats)):
            await asyncio.sleep(0.01)
        return max(0.0, deadline - now())
