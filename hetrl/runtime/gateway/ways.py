"""How a site's gateway reaches the others: directly, by an ssh tunnel, through an HTTP proxy, or over a relay.

A way works on plain TCP below ZeroMQ, whose CURVE stays from end to end. It ends in a local endpoint to which the
gateway connects as often as it likes, for each stream and after each loss:

    direct   the peer's own endpoint; a port of ours that leads there, where the peer says only later where it listens
    ssh      a port that a child `ssh -L` listens on
    proxy    a port of ours; each connection becomes a CONNECT to the peer's gateway
    relay    a port of ours; each connection becomes a dial at the relay, where the peer offers

A gateway that cannot be dialled offers: it keeps some idle connections at the relay, and when one is paired it connects
that one to its own port and opens another.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hetrl.errors import HetrlError, SiteUnreachableError
from hetrl.runtime.gateway import relay_protocol, tcp
from hetrl.runtime.gateway.link_report import LinkReport
from hetrl.runtime.gateway.relay_client import Reach, dial, enter, paired
from hetrl.runtime.gateway.relay_protocol import Request
from hetrl.runtime.gateway.ssh_tunnel import ask_command, keep_tunnel, keep_tunnel_to, require_ssh, ssh_command
from hetrl.runtime.transport.rendezvous import read_endpoint

Kind = Literal["direct", "ssh", "relay", "proxy"]
LOOPBACK = "127.0.0.1"

# A connection that leads nowhere is kept so long before it is closed: ZeroMQ opens the next one at once.
PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class Way:
    """How this site's gateway reaches that of one peer, whose `endpoint` is tcp://host:port as the last hop dials it.

    `login` (ssh's destination) goes with ssh, `relay` (host:port) with relay. `proxy` (host:port) is what connections
    leave through: with proxy to the peer, with relay to the relay. `streams` is how many connections carry data.
    Where Slurm places the peer's gateway, `endpoint` is empty, and `endpoint_file` tells it once the gateway is up:
    with ssh a file at the peer, else one in this site's directory.
    """

    way: Kind
    endpoint: str
    streams: int
    login: str | None = None
    relay: str | None = None
    proxy: str | None = None
    endpoint_file: str | None = None


@dataclass(frozen=True)
class Offer:
    """So many idle connections wait at a relay (host:port), reached through `proxy`, for those who dial this site."""

    relay: str
    count: int
    proxy: str | None = None


@dataclass(frozen=True)
class SiteLinks:
    """All ways out of one site by peer, and where it waits for those who cannot dial it.

    `proxy_credentials` and `ssh_config` name files at the site.
    """

    links: Mapping[str, Way]
    offers: tuple[Offer, ...] = ()
    proxy_credentials: str | None = None
    ssh_config: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the links as gateway.json holds them, without what is not given."""
        return asdict(self, dict_factory=lambda pairs: {name: value for name, value in pairs if value is not None})

    @property
    def relays(self) -> tuple[str, ...]:
        """Return every relay (host:port) that the site's gateway goes to."""
        found = [*(way.relay for way in self.links.values()), *(offer.relay for offer in self.offers)]
        return tuple(sorted({relay for relay in found if relay is not None}))


@dataclass(frozen=True)
class Ways:
    """The ways of one gateway: `endpoints` is what to connect to for each peer, `carry` makes them work."""

    endpoints: Mapping[str, str]
    _work: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = field(repr=False)

    async def carry(self) -> None:
        """Keep all ways open until cancelled; they come back by themselves. A defect of one ends all."""
        async with asyncio.TaskGroup() as tasks:
            for work in self._work:
                tasks.create_task(work())
            await asyncio.Event().wait()


def open_ways(
    site: str,
    run: str,
    links: SiteLinks,
    own_endpoint: str,
    relay_keys: Mapping[str, bytes],
    proxy_credentials: str | None = None,
) -> Ways:
    """Take the local ports of every way; `own_endpoint` is the gateway's, `relay_keys` are the run's keys by relay.

    Raises UsageError where this machine lacks ssh, HetrlError where a relay's key is missing.
    """
    endpoints, work = {}, []
    for peer, way in links.links.items():
        if way.way == "direct" and way.endpoint:
            endpoints[peer] = way.endpoint
            continue
        through = {"ssh": way.login, "relay": way.relay, "proxy": way.proxy, "direct": "connection"}[way.way]
        report = LinkReport(f"{site} -> {peer} by {way.way} {through}")
        listener = tcp.listen(LOOPBACK, 0)
        port = listener.getsockname()[1]
        if way.way == "ssh":
            listener.close()  # ssh listens itself
            require_ssh(site, peer)
            tunnel = functools.partial(ssh_command, str(way.login), local_port=port, ssh_config=links.ssh_config)
            if way.endpoint:
                command = tunnel(endpoint=way.endpoint.removeprefix("tcp://"))
                work.append(functools.partial(keep_tunnel, command, report))
            else:
                ask = ask_command(str(way.login), str(way.endpoint_file), links.ssh_config)
                work.append(functools.partial(keep_tunnel_to, ask, tunnel, report))
        else:
            upstream = _upstream(run, peer, way, relay_keys, proxy_credentials)
            work.append(functools.partial(_forward, listener, upstream, report))
        endpoints[peer] = f"tcp://{LOOPBACK}:{port}"
    for offer in links.offers:
        request, reach = Request(relay_protocol.OFFER, run, site), _reach(offer.proxy, proxy_credentials)
        enter_relay = functools.partial(enter, offer.relay, request, _key(site, offer.relay, relay_keys), reach)
        report = LinkReport(f"{site} <- its peers by relay {offer.relay}")
        work += [functools.partial(_offer, offer.relay, enter_relay, own_endpoint, report)] * offer.count
    return Ways(endpoints, tuple(work))


def _upstream(
    run: str, peer: str, way: Way, relay_keys: Mapping[str, bytes], proxy_credentials: str | None
) -> Callable[[], Awaitable[socket.socket]]:
    """Return what opens one connection to the peer's gateway."""
    reach = _reach(way.proxy, proxy_credentials)
    if way.relay is None:
        return functools.partial(_reach_peer, peer, way, reach)
    request = Request(relay_protocol.DIAL, run, peer)
    return functools.partial(dial, way.relay, request, _key(peer, way.relay, relay_keys), reach)


async def _reach_peer(peer: str, way: Way, reach: Reach) -> socket.socket:
    """Open a connection to the peer's gateway, where it listens by now."""
    try:
        endpoint = way.endpoint or read_endpoint(Path(str(way.endpoint_file)))
    except OSError as error:  # of a file system that is away for a moment, or whose file was replaced (ESTALE)
        raise SiteUnreachableError(f"{peer}: {way.endpoint_file} cannot be read: {error.strerror}") from None
    if endpoint is None:
        raise SiteUnreachableError(f"{peer}: its gateway is not up, or {way.endpoint_file} not here yet")
    return await reach(endpoint.removeprefix("tcp://"))


def _reach(proxy: str | None, credentials: str | None) -> Reach:
    """Return what opens a connection to host:port."""
    return functools.partial(tcp.connect_through, proxy, credentials=credentials) if proxy else tcp.connect


def _key(site: str, relay: str, relay_keys: Mapping[str, bytes]) -> bytes:
    if relay not in relay_keys:
        raise HetrlError(f"{site}: the run has no key for relay {relay}; submit the run again")
    return relay_keys[relay]


async def _forward(
    listener: socket.socket, upstream: Callable[[], Awaitable[socket.socket]], report: LinkReport
) -> None:
    """Connect each connection to the listener with one of `upstream`."""
    with listener:
        async with asyncio.TaskGroup() as connections:
            while True:
                connection = await tcp.accept(listener)
                connections.create_task(_forward_one(connection, upstream, report))


async def _forward_one(
    connection: socket.socket, upstream: Callable[[], Awaitable[socket.socket]], report: LinkReport
) -> None:
    with connection:
        try:
            far = await upstream()
        except SiteUnreachableError as error:
            report.down(str(error))
            await asyncio.sleep(PAUSE_SECONDS)
            return
        report.up()
        await tcp.splice(connection, far)


async def _offer(
    relay: str, enter_relay: Callable[[], Awaitable[socket.socket]], own_endpoint: str, report: LinkReport
) -> None:
    """Keep one idle connection at the relay; a paired one goes on beside the next."""
    pause_seconds = PAUSE_SECONDS
    async with asyncio.TaskGroup() as connections:
        while True:
            try:
                connection = await enter_relay()
                with tcp.closing_on_error(connection):
                    report.up()
                    pause_seconds = PAUSE_SECONDS
                    await paired(connection, relay)
                connections.create_task(_connect_to_self(connection, own_endpoint, report))
            except SiteUnreachableError as error:
                report.down(str(error))
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)


async def _connect_to_self(connection: socket.socket, own_endpoint: str, report: LinkReport) -> None:
    """Connect somebody who dialled with this site's gateway."""
    with connection:
        try:
            gateway = await tcp.connect(own_endpoint)
        except SiteUnreachableError as error:
            report.down(f"our own gateway: {error}")
            return
        await tcp.splice(connection, gateway)
