"""Ports on this machine: free ones, and who has one that is taken."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import psutil

from hetrl.describe.sites import SiteFile
from hetrl.errors import UsageError

LOOPBACK = "127.0.0.1"


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Return so many different ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:  # all stay bound until the last is, or two might get the same port
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]


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
