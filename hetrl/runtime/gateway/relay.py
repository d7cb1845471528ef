"""The relay: pairs gateways that cannot dial each other and carries their bytes. It needs no rights and no zmq.

    for each connection: greet it, read one request, check it (hetrl.runtime.gateway.relay_protocol)
        its counterpart waits: hand the connection over to it
        else: wait for the counterpart (an offer for as long as it lives, a dial for DIAL_SECONDS), then splice

Whoever does not know the run's key gets one line and is gone within PREAMBLE_SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter, deque
from typing import Any

from hetrl.runtime.gateway import relay_protocol, tcp
from hetrl.runtime.gateway.relay_protocol import Request

PREAMBLE_SECONDS = 10.0
DIAL_SECONDS = 5.0  # ZeroMQ gives a connection 10 s to shake hands with the other gateway, this wait included
STRANGERS = 64  # connections that have not shown a key yet
STATUS_SECONDS = 60.0
_QUIET_SECONDS = 1.0  # at most one line about refusals per so long

_log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """Whoever is on the connection gets one line, which says why, and nothing else."""


class Relay:
    """Serves the gateways of every run whose key follows from `secret`.

    `connections` bounds how many are open at once; a spliced pair counts two and holds two buffers of
    `tcp.BUFFER_BYTES`.
    """

    def __init__(self, listener: socket.socket, secret: str, *, connections: int = 512) -> None:
        self._listener, self._secret, self._connections = listener, secret, connections
        self._waiting: dict[Request, deque[asyncio.Future[socket.socket]]] = {}  # for the counterparts' connections
        self._tasks: set[asyncio.Task[None]] = set()
        self._counted: Counter[str] = Counter()
        self._strangers = self._splices = 0
        self._logged_seconds = float("-inf")

    @property
    def status(self) -> dict[str, int]:
        """Return what is open at present, and what was since the start."""
        waiting = Counter(request.role for request, queue in self._waiting.items() for _ in queue)
        return {
            "connections": self._open,
            "splices": self._splices,
            "offers_waiting": waiting[relay_protocol.OFFER],
            "dials_waiting": waiting[relay_protocol.DIAL],
            **{name: self._counted[name] for name in ("accepted", "paired", "refused", "bytes")},
        }

    @property
    def _open(self) -> int:
        """Return the open connections: one per task, and the second one of each splice."""
        return len(self._tasks) + self._splices

    async def serve(self) -> None:
        """Accept connections until cancelled; then close all of them."""
        try:
            while True:
                connection = await tcp.accept(self._listener)
                self._counted["accepted"] += 1
                task = asyncio.create_task(self._attend(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            self._listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attend(self, connection: socket.socket) -> None:
        """Do all that one connection needs; whatever it sends, nothing else is touched."""
        handed_over = False
        try:
            request = await self._admit(connection)
            handed_over = self._hand_over(connection, request)
            if not handed_over:
                partner = await self._wait(connection, request)
                await self._splice(connection, partner, request)
        except _RefusedError as refusal:
            self._refuse(connection, str(refusal))
        except OSError as error:
            _log.debug("a connection ended: %s", error)
        finally:
            if not handed_over:
                connection.close()

    async def _admit(self, connection: socket.socket) -> Request:
        """Return the request of a gateway with a key. Raises _RefusedError for anybody else."""
        if self._open > self._connections or self._strangers >= STRANGERS:
            raise _RefusedError("too many connections")
        self._strangers += 1
        try:
            async with asyncio.timeout(PREAMBLE_SECONDS):
                nonce, line = relay_protocol.greeting()
                await tcp.send(connection, line)
                said = await tcp.read_through(connection, b"\n", relay_protocol.LINE_BYTES)
                request = relay_protocol.parse_request(said, nonce, self._secret)
                await tcp.send(connection, relay_protocol.WAITING)
                return request
        except relay_protocol.WrongKeyError as error:
            raise _RefusedError(str(error)) from None
        except ValueError:
            raise _RefusedError("this is a relay of hetrl, and that was no request to it") from None
        except TimeoutError:
            raise _RefusedError(f"no request within {PREAMBLE_SECONDS:g} s") from None
        finally:
            self._strangers -= 1

    def _refuse(self, connection: socket.socket, why: str) -> None:
        """Say why, to the other end and in the log; a scan of ports must not fill the log."""
        self._counted["refused"] += 1
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds - self._logged_seconds > _QUIET_SECONDS:
            self._logged_seconds = now_seconds
            _log.warning("refused %s: %s (%d refused so far)", _peer(connection), why, self._counted["refused"])
        with contextlib.suppress(OSError):  # it fits into the send buffer, or nobody is there to read it
            connection.send(relay_protocol.refusal(why))

    def _hand_over(self, connection: socket.socket, request: Request) -> bool:
        """Give the connection to the counterpart that has waited longest; return whether there is one."""
        queue = self._waiting.get(request.counterpart)
        if not queue:
            return False
        queue.popleft().set_result(connection)
        return True

    async def _wait(self, connection: socket.socket, request: Request) -> socket.socket:
        """Return the connection of the counterpart.

        Raises _RefusedError for a dial that waited too long, ConnectionError where this end hung up or spoke too early.
        """
        partner: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request, deque()).append(partner)
        hangup = asyncio.create_task(_hung_up(connection))
        events: set[asyncio.Future[Any]] = {partner, hangup}
        patience_seconds = DIAL_SECONDS if request.role == relay_protocol.DIAL else None
        try:
            await asyncio.wait(events, timeout=patience_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hangup.cancel()
            await asyncio.gather(hangup, return_exceptions=True)
            self._forget(partner, request)
        if partner.done():
            return partner.result()
        if hangup.cancelled():
            raise _RefusedError(f"no gateway of {request.site} waits here")
        raise ConnectionError("hung up")

    def _forget(self, partner: asyncio.Future[socket.socket], request: Request) -> None:
        queue = self._waiting.get(request, deque())
        if partner in queue:
            queue.remove(partner)
        if not queue:
            self._waiting.pop(request, None)

    async def _splice(self, connection: socket.socket, partner: socket.socket, request: Request) -> None:
        """Tell both ends that they are connected, then carry their bytes."""
        self._counted["paired"] += 1
        self._splices += 1
        _log.info("%s: a connection to %s (%d open)", request.run, request.site, self._splices)
        try:
            for end in (connection, partner):
                await tcp.send(end, relay_protocol.PAIRED)
            await tcp.splice(connection, partner, count=lambda size_bytes: self._counted.update(bytes=size_bytes))
        finally:
            self._splices -= 1
            partner.close()


async def _hung_up(connection: socket.socket) -> None:
    """Return when the connection ends, or says something before it may."""
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().sock_recv(connection, 1)


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return "somebody who is gone"


async def report_status(relay: Relay, every_seconds: float = STATUS_SECONDS) -> None:
    """Print the relay's status as a line of JSON every so often."""
    while True:
        await asyncio.sleep(every_seconds)
        print(json.dumps(relay.status), flush=True)
