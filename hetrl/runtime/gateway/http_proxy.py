"""Connections through a site's HTTP proxy: the CONNECT method (RFC 9110, section 9.3.6)."""

from __future__ import annotations

import asyncio
import base64
import socket

from hetrl.errors import SiteUnreachableError
from hetrl.runtime.gateway import tcp

ANSWER_BYTES = 16 * 1024
ANSWER_SECONDS = 20.0  # the proxy connects before it answers

_NEXT = {
    403: "the proxy forbids it: ask for that host and port, or move the other end to a port it allows (often 443)",
    407: "it wants a password: set proxy_credentials in the site's file",
    502: "the proxy cannot reach it",
    503: "the proxy cannot reach it",
    504: "the proxy cannot reach it",
}


async def connect_through(proxy: str, address: str, credentials: str | None = None) -> socket.socket:
    """Return a connection to `address` (host:port) that the proxy at `proxy` made; `credentials` are `user:password`.

    Raises SiteUnreachableError that names the proxy, the address and what to do.
    """
    connection = await tcp.connect(proxy)
    with tcp.closing_on_error(connection):
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await tcp.send(connection, connect_request(address, credentials))
                answer = await tcp.read_through(connection, b"\r\n\r\n", ANSWER_BYTES)
        except TimeoutError:
            raise SiteUnreachableError(f"proxy {proxy} did not answer within {ANSWER_SECONDS:g} s") from None
        except (OSError, ValueError) as error:
            raise SiteUnreachableError(f"proxy {proxy} gave no answer of HTTP ({error})") from None
        status, reason = status_of(answer)
        if not 200 <= status < 300:
            remedy = f"; {_NEXT[status]}" if status in _NEXT else ""
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
    # Printable text only: it goes to the log.
    return int(number), "".join(letter for letter in reason if letter.isprintable())[:80]
