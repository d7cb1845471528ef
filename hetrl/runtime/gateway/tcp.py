"""Plain TCP connections below ZeroMQ: connect, also through an HTTP proxy, listen, read a preamble, splice two of them.

Everything here works on non-blocking sockets of the running event loop. What passes is ciphertext of CURVE
(`hetrl.runtime.wire.keys`): nothing here needs to be trusted with more than the addresses.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetrl.errors import SiteUnreachableError, UsageError
from hetrl.runtime.transport.liveness import (
    KEEP_ALIVE_COUNT,
    KEEP_ALIVE_IDLE_SECONDS,
    KEEP_ALIVE_SECONDS,
    UNACKNOWLEDGED_MS,
)
from hetrl.runtime.transport.pacing import pace
from hetrl.text import printable

BUFFER_BYTES = 256 * 1024  # per direction of a splice, and all that it holds
CONNECT_SECONDS = 10.0
ANSWER_BYTES = 16 * 1024  # of a proxy
ANSWER_SECONDS = 20.0  # the proxy connects before it answers
IDLE_SECONDS = 120.0  # something crosses each stream of a living link every 15 s
_BACKLOG = 1024  # the kernel has its own limit (net.core.somaxconn)
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}  # accept(2)
_ACCEPT_PAUSE_SECONDS = 1.0
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": KEEP_ALIVE_IDLE_SECONDS,
    "TCP_KEEPINTVL": KEEP_ALIVE_SECONDS,
    "TCP_KEEPCNT": KEEP_ALIVE_COUNT,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS,
}

_PROXY_REMEDIES = {
    403: "the proxy forbids it: ask for that host and port, or move the other end to a port it allows (often 443)",
    407: "it wants a password: set proxy_credentials in the site's file",
    502: "the proxy cannot reach it",
    503: "the proxy cannot reach it",
    504: "the proxy cannot reach it",
}

_log = logging.getLogger(__name__)


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of `host:port`, `[v6]:port` or `tcp://host:port`; raises UsageError for anything else."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    # ASCII digits only: int() would take those of other scripts, signs and underscores.
    if not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f'"{address}" is not an address; write host:port, as login.example.org:7443')
    return bare, int(port)


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address, port 0 for any free one. Raises UsageError for one that is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise UsageError(f"cannot listen on {host}, port {port} ({why}); take another address or port") from None
    listener.setblocking(False)
    return listener


async def accept(listener: socket.socket) -> socket.socket:
    """Return the next connection; where the process may open no more files, one that comes when it may again."""
    while True:
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            return _prepared(connection)
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            _log.warning("cannot accept a connection: %s", error.strerror)
            await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)


async def connect(address: str, seconds: float = CONNECT_SECONDS) -> socket.socket:
    """Return a connection to `host:port`, the first of the host's addresses that answers.

    Each has an equal part of what is left of `seconds`: behind a firewall one of them may never answer. Raises
    SiteUnreachableError that names the address where none does.
    """
    host, port = host_and_port(address)
    failure = "it has no address"
    try:
        async with asyncio.timeout(seconds) as deadline:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for left, (family, kind, protocol, _, where) in zip(range(len(found), 0, -1), found, strict=True):
                part = ((deadline.when() or 0.0) - loop.time()) / left
                try:
                    async with asyncio.timeout(part):
                        return await _connect(socket.socket(family, kind, protocol), where)
                except TimeoutError:
                    failure = f"no answer within {part:.3g} s"
                except OSError as error:
                    failure = os.strerror(error.errno or 0)
    except TimeoutError:
        raise SiteUnreachableError(f"{address} did not answer within {seconds:g} s") from None
    except socket.gaierror as error:
        failure = error.strerror or str(error)
    raise SiteUnreachableError(f"cannot connect to {address} ({failure})")


async def _connect(connection: socket.socket, where: Any) -> socket.socket:
    with closing_on_error(connection):
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, where)
        return _prepared(connection)


async def read_through(connection: socket.socket, end: bytes, limit_bytes: int) -> bytes:
    """Return what arrives up to and with `end`, and not a byte more: what follows belongs to whoever is spliced on.

    Raises ValueError where `limit_bytes` come without it, ConnectionError where the connection ends first.
    """
    loop = asyncio.get_running_loop()
    text = b""
    while not text.endswith(end):
        if len(text) >= limit_bytes:
            raise ValueError(f"no end within {limit_bytes} bytes")
        byte = await loop.sock_recv(connection, 1)
        if not byte:
            raise ConnectionError("the connection ended")
        text += byte
    return text


async def send(connection: socket.socket, data: bytes) -> None:
    """Send all of it."""
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def splice(
    one: socket.socket,
    other: socket.socket,
    *,
    idle_seconds: float = IDLE_SECONDS,
    count: Callable[[int], None] = lambda size_bytes: None,
) -> None:
    """Carry bytes both ways until both ends are done or one fails, then close both.

    An end that only stops sending is passed on as such (half-close). Nothing for `idle_seconds` ends the splice.
    `count` is told the size of every piece.
    """
    with one, other:
        idle = _Idle(idle_seconds)
        directions = [asyncio.create_task(_pump(*pair, idle, count)) for pair in ((one, other), (other, one))]
        watch = asyncio.create_task(idle.expire())
        ends: set[asyncio.Future[Any]] = {asyncio.gather(*directions), watch}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*directions, watch):
                task.cancel()
            await asyncio.gather(*directions, *ends, return_exceptions=True)


class _Idle:
    """Ends when nothing happened for a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.touched = False

    async def expire(self) -> None:
        self.touched = True
        while self.touched:
            self.touched = False
            await asyncio.sleep(self._seconds)


async def _pump(source: socket.socket, sink: socket.socket, idle: _Idle, count: Callable[[int], None]) -> None:
    """Carry one direction through one buffer: a sink that does not take holds the source back."""
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while size_bytes := await loop.sock_recv_into(source, buffer):
        await loop.sock_sendall(sink, buffer[:size_bytes])
        idle.touched = True
        count(size_bytes)
        await asyncio.sleep(0)  # bytes that are there already would not let anybody else run
    sink.shutdown(socket.SHUT_WR)


@contextmanager
def closing_on_error(connection: socket.socket) -> Iterator[socket.socket]:
    """Close the connection where the block fails, keep it open where it does not."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _prepared(connection: socket.socket) -> socket.socket:
    """Send small messages at once and large ones evenly, and notice a peer whose host is gone."""
    connection.setblocking(False)
    pace(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


# ---- through a site's HTTP proxy: the CONNECT method (RFC 9110, section 9.3.6)


async def connect_through(proxy: str, address: str, credentials: str | None = None) -> socket.socket:
    """Return a connection to `address` (host:port) that the proxy at `proxy` made; `credentials` are `user:password`.

    Raises SiteUnreachableError that names the proxy, the address and what to do.
    """
    connection = await connect(proxy)
    with closing_on_error(connection):
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await send(connection, connect_request(address, credentials))
                answer = await read_through(connection, b"\r\n\r\n", ANSWER_BYTES)
        except TimeoutError:
            raise SiteUnreachableError(f"proxy {proxy} did not answer within {ANSWER_SECONDS:g} s") from None
        except (OSError, ValueError) as error:
            raise SiteUnreachableError(f"proxy {proxy} gave no answer of HTTP ({error})") from None
        status, reason = status_of(answer)
        if not 200 <= status < 300:
            remedy = f"; {_PROXY_REMEDIES[status]}" if status in _PROXY_REMEDIES else ""
            raise SiteUnreachableError(f"proxy {proxy} answered {status} {reason} to CONNECT {address}{remedy}")
        return connection


def connect_request(address: str, credentials: str | None) -> bytes:
    """Return the request for a tunnel to `address`."""
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if credentials is not None:
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def status_of(answer: bytes) -> tuple[int, str]:
    """Return status and reason of an answer; a status of 0 where it is not HTTP."""
    version, _, rest = answer.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
    number, _, reason = rest.partition(" ")
    if not version.startswith("HTTP/1.") or len(number) != 3 or not (number.isascii() and number.isdigit()):
        return 0, "(not HTTP)"
    return int(number), printable(reason, 80)
