"""The gateway of one site: the only process there that speaks to other sites.

    member --CURVE--> ROUTER of its site --one copy per site, CURVE--> ROUTER of the other site --> each receiver there

Reading never stops, so that no two sites can wait for each other: what bounds the queues is the window of each sender
(`hetrl.runtime.window`). A message that cannot be handed over comes back to its source as `Undeliverable`.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import logging
import signal
import sys
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime import wire
from hetrl.runtime.keys import SiteKeys, read_keys
from hetrl.runtime.lane import Attempt, Lane, Parcel
from hetrl.runtime.sockets import LINGER_SECONDS, NO_ANSWER, client_socket, gateway_of, server_socket, sizes

HOLD_SECONDS = 300.0  # engines take minutes to come up, in any order
_LINK_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

_log = logging.getLogger(__name__)


class Gateway:
    """Hands messages from members of `site` to members anywhere in `run`; `serve` does the work.

    `peers` are the endpoints of the other sites' gateways. Messages for a member or a site that is not up yet are
    held for `hold_seconds`.
    """

    def __init__(
        self,
        site: str,
        run: str,
        bind_endpoint: str,
        peers: Mapping[str, str],
        keys: SiteKeys,
        *,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        strangers = sorted(set(peers) - set(keys.peers) - {site})
        if strangers or keys.site != site:
            raise HetrlError(f"{site}: the key file of {keys.site} does not fit (no key of {strangers}); submit again")
        self.site, self.address = site, gateway_of(site)
        self.refused = 0
        self.malformed = 0
        self._run, self._bind_endpoint, self._keys = run, bind_endpoint, keys
        self._endpoints = {peer: endpoint for peer, endpoint in peers.items() if peer != site}
        self._sites = keys.site_by_key()
        self._hold_seconds = hold_seconds
        self._members: dict[str, bytes] = {}
        self._links: dict[str, zmq.asyncio.Socket] = {}
        self._up: set[str] = set()
        self._met: set[str] = set()
        self._lanes: dict[str, Lane] = {}
        self._traffic: dict[str, Counter[str]] = {peer: Counter() for peer in self._endpoints}
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[zmq.asyncio.Socket] = []
        self._linger_seconds = 0.0
        self._stop = asyncio.Event()
        self._defect: BaseException | None = None

    async def serve(self) -> None:
        """Work until `stop`; then send what is queued for at most 2 s. Raises HetrlError when the port is taken."""
        self._context = zmq.asyncio.Context()
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.configure_curve_callback("*", self)
        self._authenticator.start()
        try:
            self._router = server_socket(self._context, self._keys)
            self._sockets.append(self._router)
            self._bind()
            for peer, endpoint in self._endpoints.items():
                self._links[peer] = self._connect(peer, endpoint)
            self._start(self._read())
            _log.info("%s: the gateway listens on %s", self.site, self._bind_endpoint)
            await self._stop.wait()
            if self._defect is not None:
                raise self._defect
            await self._drain()
        finally:
            await self._close()

    def stop(self) -> None:
        """Make `serve` drain and return."""
        self._stop.set()

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell the authenticator whether a client's key is one of the run (its interface names this method)."""
        known = key.decode() in self._sites
        if not known:
            self.refused += 1
            _log.warning("%s: refused a connection whose key is not of this run", self.site)
        return known

    def _bind(self) -> None:
        host, _, port = self._bind_endpoint.removeprefix("tcp://").rpartition(":")
        try:
            self._router.bind(self._bind_endpoint)
        except zmq.ZMQError as error:
            if error.errno == errno.EADDRINUSE:
                raise HetrlError(
                    f"{self.site}: port {port} for the gateway is taken on {host}; "
                    "stop what uses it or set gateway_port in the site's file"
                ) from error
            raise HetrlError(
                f"{self.site}: the gateway cannot listen on {self._bind_endpoint} ({error}); "
                "set interface and gateway_port in the site's file"
            ) from error

    def _connect(self, peer: str, endpoint: str) -> zmq.asyncio.Socket:
        link = client_socket(self._context, self._keys, self._keys.peers[peer])
        monitor = link.get_monitor_socket(_LINK_EVENTS)
        self._sockets += [link, monitor]
        self._start(self._watch(peer, monitor))
        link.connect(endpoint)
        return link

    async def _watch(self, peer: str, monitor: zmq.asyncio.Socket) -> None:
        """Know which sites are connected."""
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up.add(peer)
                self._met.add(peer)
            else:
                self._up.discard(peer)
            _log.info("%s: the link to %s is %s", self.site, peer, "up" if peer in self._up else "down")

    async def _read(self) -> None:
        while True:
            identity, *frames = await self._router.recv_multipart(copy=False)
            await asyncio.sleep(0)  # a message that is there already would not let anybody else run
            try:
                self._admit(bytes(identity.buffer), frames)
            except (msgspec.MsgspecError, ValueError, LookupError) as error:
                self.malformed += 1
                _log.warning("%s: dropped a malformed message: %s", self.site, error)

    def _admit(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """Take one message from a member of this site or from another gateway; raises ValueError on a bad one."""
        header = wire.decode_header(frames[0].buffer)
        origin = self._sites[str(frames[0].get("User-Id"))]
        if header.run != self._run or wire.site_of(header.source) != origin or not header.to or len(frames) < 2:
            raise ValueError(f"from {header.source} of run {header.run} with the key of {origin}")
        if origin != self.site:
            self._count(origin, "received", sizes(frames))
        if self.address in header.to:
            self._answer(header, wire.decode_message(frames[1].buffer), identity)
        self._route(header, frames, origin)

    def _route(self, header: wire.Header, frames: list[Any], origin: str) -> None:
        """Queue a message once per other site and once per receiver here."""
        size_bytes = sizes(frames)
        arrived_seconds = asyncio.get_running_loop().time()
        for site, receivers in wire.by_site(tuple(dict.fromkeys(header.to))).items():
            if site == self.site:
                groups: dict[str, tuple[str, ...]] = {
                    receiver: (receiver,) for receiver in receivers if receiver != self.address
                }
            else:
                # What came from another site went from there to each site among its receivers.
                groups = {site: receivers} if origin == self.site else {}
            for destination, group in groups.items():
                parcel = Parcel(header, frames, group, size_bytes, arrived_seconds)
                if site in (self.site, *self._links):
                    self._lane(destination).offer(parcel)
                else:
                    self._refuse(parcel, f"{site} is not a site of this run")

    def _answer(self, header: wire.Header, message: wire.Message, identity: bytes) -> None:
        """Do what a message to the gateway itself asks: a hello or the counters."""
        match message:
            case wire.Heartbeat() if wire.site_of(header.source) == self.site:
                self._members[header.source] = identity
                _log.info("%s: %s is connected", self.site, header.source)
            case wire.LinkStats():
                links = {peer: wire.LinkCounters(**counter) for peer, counter in self._traffic.items()}
                stats = wire.LinkStatsReply(links=links, refused=self.refused, malformed=self.malformed)
                self._reply(header, stats)

    def _reply(self, header: wire.Header, message: wire.Message) -> None:
        reply = wire.Header(run=self._run, source=self.address, to=(header.source,), id=NO_ANSWER, reply_to=header.id)
        self._route(reply, wire.encode(reply, message), self.site)

    def _refuse(self, parcel: Parcel, cause: str) -> None:
        """Tell the source of a parcel that it was not handed over."""
        _log.warning("%s: %s to %s refused: %s", self.site, parcel.header.source, ", ".join(parcel.receivers), cause)
        for receiver in parcel.receivers:
            if parcel.header.id != NO_ANSWER:
                self._reply(parcel.header, wire.Undeliverable(receiver=receiver, cause=f"{self.address}: {cause}"))

    def _lane(self, destination: str) -> Lane:
        """Return the lane towards a member of this site or another site."""
        if destination not in self._lanes:
            attempt = self._send_to_site if destination in self._links else self._send_to_member
            self._lanes[destination] = Lane(destination, attempt, self._refuse, self._hold_seconds)
            self._start(self._lanes[destination].pump())
        return self._lanes[destination]

    async def _send_to_member(self, parcel: Parcel) -> Attempt:
        identity = self._members.get(parcel.receivers[0])
        if identity is None:
            return Attempt.ABSENT
        return await _try_send(self._router, [identity, *parcel.frames])

    async def _send_to_site(self, parcel: Parcel) -> Attempt:
        peer = wire.site_of(parcel.receivers[0])
        if peer not in self._up:
            return Attempt.LOST if peer in self._met else Attempt.ABSENT
        attempt = await _try_send(self._links[peer], parcel.frames)
        if attempt is Attempt.SENT:
            self._count(peer, "sent", parcel.bytes)
        return attempt

    def _count(self, peer: str, direction: str, size_bytes: int) -> None:
        counter = self._traffic.setdefault(peer, Counter())
        counter[f"messages_{direction}"] += 1
        counter[f"bytes_{direction}"] += size_bytes

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a defect: `serve` raises it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._defect = error
            self._stop.set()

    async def _drain(self) -> None:
        """Give the lanes and then the sockets `LINGER_SECONDS` together to send what they hold."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + LINGER_SECONDS
        while clock() < deadline and not all(lane.settled for lane in self._lanes.values()):
            await asyncio.sleep(0.01)
        self._linger_seconds = max(0.0, deadline - clock())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            link.disable_monitor()
        for socket in self._sockets:
            socket.close(linger=int(self._linger_seconds * 1000))
        self._authenticator.stop()
        await asyncio.to_thread(self._context.term)


async def _try_send(socket: zmq.asyncio.Socket, frames: Sequence[Any]) -> Attempt:
    """Hand a message to a socket if it can take it now."""
    try:
        await socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
    except zmq.Again:
        return Attempt.BUSY
    except zmq.ZMQError as error:
        if error.errno != errno.EHOSTUNREACH:
            raise
        return Attempt.LOST
    return Attempt.SENT


def read_gateway(path: Path) -> Gateway:
    """Read a gateway's member file: run, site, bind, peers, hold_seconds and the path of its keys."""
    try:
        raw = json.loads(path.read_text())
        keys, hold_seconds = read_keys(raw["keys"]), float(raw["hold_seconds"])
        return Gateway(raw["site"], raw["run"], raw["bind"], raw["peers"], keys, hold_seconds=hold_seconds)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the gateway's member file ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a gateway's member file ({error!r}); submit the run again") from error


async def _serve_until_terminated(gateway: Gateway) -> None:
    serving = asyncio.create_task(gateway.serve())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, gateway.stop)
    await serving


def main() -> int:
    """Run the gateway that `--member FILE` describes until SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.gateway", description=main.__doc__)
    parser.add_argument("--member", type=Path, required=True, help="JSON: run, site, bind, peers, hold_seconds, keys")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        asyncio.run(_serve_until_terminated(read_gateway(parser.parse_args().member)))
    except HetrlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
