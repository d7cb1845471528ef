"""A gateway at a relay: dials the gateways of other sites there, and offers connections to its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from hetrl.errors import SiteUnreachableError
from hetrl.runtime.gateway import relay_protocol, tcp
from hetrl.runtime.gateway.relay import DIAL_SECONDS, PREAMBLE_SECONDS
from hetrl.runtime.gateway.relay_protocol import Request

Reach = Callable[[str], Awaitable[socket.socket]]  # from host:port to a connection

_MARGIN_SECONDS = 5.0  # the relay's own answer to a dial that waits too long comes first


async def enter(relay: str, request: Request, key: bytes, reach: Reach) -> socket.socket:
    """Return a connection on which the relay at `relay` (host:port) knows this gateway; `paired` comes next.

    Raises SiteUnreachableError that names the relay and what to do.
    """
    connection = await reach(relay)
    with tcp.closing_on_error(connection):
        try:
            async with asyncio.timeout(PREAMBLE_SECONDS):
                greeting = await _read_line(connection, relay)
                nonce = relay_protocol.nonce_of(greeting)
                await tcp.send(connection, relay_protocol.request_line(request, nonce, key))
                if await _read_line(connection, relay) != relay_protocol.WAITING:
                    raise ValueError("no word about the request")
        except TimeoutError:
            raise SiteUnreachableError(f"relay {relay} said nothing for {PREAMBLE_SECONDS:g} s") from None
        except (OSError, ValueError) as error:
            raise SiteUnreachableError(f"what answers at {relay} is no relay ({error}); start `hetrl relay`") from None
        return connection


async def paired(connection: socket.socket, relay: str) -> None:
    """Return when the other side is there. Raises SiteUnreachableError where the relay refuses or ends."""
    try:
        if await _read_line(connection, relay) != relay_protocol.PAIRED:
            raise ConnectionError("it said something else")
    except (OSError, ValueError) as error:
        raise SiteUnreachableError(f"relay {relay} ended the connection ({error})") from None


async def dial(relay: str, request: Request, key: bytes, reach: Reach) -> socket.socket:
    """Return a connection to the gateway that `request` names.

    Raises SiteUnreachableError where the relay refuses, or has no offer of that gateway within its patience.
    """
    connection = await enter(relay, request, key, reach)
    with tcp.closing_on_error(connection):
        try:
            async with asyncio.timeout(DIAL_SECONDS + _MARGIN_SECONDS):
                await paired(connection, relay)
        except TimeoutError:
            raise SiteUnreachableError(f"relay {relay} said nothing for {DIAL_SECONDS + _MARGIN_SECONDS:g} s") from None
        return connection


async def _read_line(connection: socket.socket, relay: str) -> bytes:
    """Return the relay's next line; raises SiteUnreachableError where it is a refusal."""
    line = await tcp.read_through(connection, b"\n", relay_protocol.LINE_BYTES)
    if (why := relay_protocol.why_refused(line)) is not None:
        raise SiteUnreachableError(f"relay {relay} refused: {why}")
    return line
