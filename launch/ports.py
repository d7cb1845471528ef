"""Ports on this machine: free ones, and who has one that is taken."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice, repeat
from pathlib import Path

import psutil

from hetrl.describe.sites import SiteFile
from hetrl.errors import UsageError

LOOPBACK = "127.0.0.1"
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Return so many different ports that nobody listens on now.

    None of those from which the kernel takes one for whoever connects: such a port may be gone before its gateway
    listens, seconds later.
    """
    with ExitStack() as stack:  # all stay bound until the last is, or two might get the same port
        bound = (_bound(host, port) for port in chain(_beside_ephemeral(), repeat(0)))
        sockets = islice((stack.enter_context(one) for one in bound if one is not None), count)
        return [int(one.getsockname()[1]) for one in sockets]


def _bound(host: str, port: int) -> socket.socket | None:
    """Return a socket that has the port, None where somebody else does."""
    one = socket.socket()
    try:
        one.bind((host, port))
    except OSError as error:
        one.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return one


def _beside_ephemeral() -> Iterator[int]:
    """Give in random order the ports from 20000 up that are not ephemeral (ip(7), ip_local_port_range), if there are.

    Below are those of known services: Slurm's, NFS.
    """
    try:
        first, last = map(int, _EPHEMERAL.read_text().split())
    except OSError:
        return
    beside = [*range(20_000, first), *range(last + 1, 65_536)]
    yield from random.sample(beside, len(beside))


def gateway_endpoints(sites: Sequence[SiteFile]) -> dict[str, str]:
    """Return `tcp://host:port` of each site's gateway: the port that its file fixes, else any free one.

    Where a site has a `prefix`, its address may be one that this machine cannot try: the port is taken as it is, or
    one that is free here. Raises UsageError for a port that is taken, twice in the files, or on an address that is not
    this machine's.
    """
    owners: dict[tuple[str, int], str] = {}
    endpoints = {}
    for site in sites:
        host, port = site.gateway_host, site.gateway_port
        if not port:
            port = _free_port_but(LOOPBACK if site.prefix else host, owners)
        elif not site.prefix:
            _check_free(site.name, host, port)
        if other := owners.get((host, port)):
            raise UsageError(f"{other} and {site.name}: both have gateway_port {port}; give each site its own")
        owners[host, port] = site.name
        endpoints[site.name] = f"tcp://{host}:{port}"
    return endpoints


def _free_port_but(host: str, taken: Iterable[tuple[str, int]]) -> int:
    avoided = {port for _, port in taken}
    return next(port for port in free_ports(len(avoided) + 1, host) if port not in avoided)


def _check_free(site: str, host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateway does: TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"{site}: cannot listen on {host}, port {port} ({error.strerror}); "
                    "set gateway_host and gateway_port in the site's file"
                ) from None
            raise UsageError(
                f"{site}: port {port} on {host} is taken{_owner(port)}; set gateway_port in the site's file "
                "(0: any free port)"
            ) from None


def _owner(port: int) -> str:
    """Return ` by NAME (process PID)` where this user may know it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:] == (port,):
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except psutil.Error:
        pass
    return ""
