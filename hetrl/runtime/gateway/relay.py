"""The relay: pairs gateways that cannot dial each other and carries their bytes. It needs no rights and no zmq.

    for each connection: greet it, read one request, check it (hetrl.runtime.gateway.relay_protocol)
        its counterpart waits: hand the connection over to it
        else: wait for the counterpart (an offer for as long as it lives, a dial for DIAL_SECONDS), then splice

Whoever does not know the run's key gets one line and is gone within PREAMBLE_SECONDS; how many of them there may be
meanwhile, and how many that know one, says `hetrl.runtime.gateway.relay_door`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter, deque
from typing import Any, NamedTuple

from hetrl.runtime.gateway import relay_protocol, tcp
from hetrl.runtime.gateway.relay_door import PAUSE_SECONDS, Door, RefusedError, address_of
from hetrl.runtime.gateway.relay_protocol import Request

CONNECTIONS = 512
PER_ADDRESS = 128  # a dozen pairs of sites
PREAMBLE_SECONDS = 10.0
DIAL_SECONDS = 5.0  # ZeroMQ gives a connection 10 s to shake hands with the other gateway, this wait included
STATUS_SECONDS = 60.0
_QUIET_SECONDS = 1.0  # at most one line about refusals per so long

_log = logging.getLogger(__name__)


class _Partner(NamedTuple):
    """The connection that somebody waited for, carried by whoever waited until it is `over`."""

    connection: socket.socket
    over: asyncio.Event


class Relay:
    """Serves the gateways of every run whose key follows from `secret`.

    `connections` of gateways are open at once, `per_address` of them from one address; a spliced pair counts two and
    holds two buffers of `tcp.BUFFER_BYTES`.
    """

    def __init__(
        self, listener: socket.socket, secret: str, *, connections: int = CONNECTIONS, per_address: int = PER_ADDRESS
    ) -> None:
        self._listener, self._secret, self._door = listener, secret, Door(connections, per_address)
        self._waiting: dict[Request, deque[asyncio.Future[_Partner]]] = {}  # for their counterparts
        self._tasks: set[asyncio.Task[None]] = set()
        self._counted: Counter[str] = Counter()
        self._splices = 0
        self._logged_seconds = float("-inf")

    @property
    def status(self) -> dict[str, int]:
        """Return what is open at present, and what was since the start."""
        waiting = Counter(request.role for request, queue in self._waiting.items() for _ in queue)
        return {
            "connections": len(self._tasks),
            "strangers": self._door.strangers,
            "splices": self._splices,
            "offers_waiting": waiting[relay_protocol.OFFER],
            "dials_waiting": waiting[relay_protocol.DIAL],
            **{name: self._counted[name] for name in ("accepted", "paired", "refused", "bytes")},
        }

    async def serve(self) -> None:
        """Accept connections until cancelled; then close all of them."""
        try:
            while True:
                connection = await tcp.accept(self._listener)
                self._counted["accepted"] += 1
                task = asyncio.create_task(self._attend(connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _attend(self, connection: socket.socket) -> None:
        """Do all that one connection needs; whatever it sends, nothing else is touched."""
        with connection:
            address = address_of(connection)
            try:
                request = await self._ask(connection, address)
                with self._door.admitted(address):
                    await tcp.send(connection, relay_protocol.WAITING)
                    await self._connect(connection, request)
            except RefusedError as refusal:
                self._refuse(connection, address, str(refusal))
            except OSError as error:
                _log.debug("a connection ended: %s", error)

    async def _ask(self, connection: socket.socket, address: str) -> Request:
        """Return the request of a gateway with a key. Raises RefusedError for anybody else."""
        try:
            async with asyncio.timeout(PREAMBLE_SECONDS) as deadline:
                with self._door.greeted(address, deadline):
                    nonce, line = relay_protocol.greeting()
                    await tcp.send(connection, line)
                    said = await tcp.read_through(connection, b"\n", relay_protocol.LINE_BYTES)
                    return relay_protocol.parse_request(said, nonce, self._secret)
        except relay_protocol.WrongKeyError as error:
            raise RefusedError(str(error)) from None
        except ValueError:
            raise RefusedError("this is a relay of hetrl, and that was no request to it") from None
        except TimeoutError:
            raise RefusedError(f"no request within {PREAMBLE_SECONDS:g} s") from None

    def _refuse(self, connection: socket.socket, address: str, why: str) -> None:
        """Say why, to the other end and in the log; a scan of ports must not fill the log."""
        self._counted["refused"] += 1
        now_seconds = asyncio.get_running_loop().time()
        if now_seconds - self._logged_seconds > _QUIET_SECONDS:
            self._logged_seconds = now_seconds
            _log.warning("refused %s: %s (%d refused so far)", address, why, self._counted["refused"])
        with contextlib.suppress(OSError):  # it fits into the send buffer, or nobody is there to read it
            connection.send(relay_protocol.refusal(why))

    async def _connect(self, connection: socket.socket, request: Request) -> None:
        """Hand the connection to the counterpart that has waited longest; where there is none, wait for one."""
        if queue := self._waiting.get(request.counterpart):
            over = asyncio.Event()
            queue.popleft().set_result(_Partner(connection, over))
            await over.wait()
            return
        partner = await self._wait(connection, request)
        try:
            await self._splice(connection, partner.connection, request)
        finally:
            partner.over.set()

    async def _wait(self, connection: socket.socket, request: Request) -> _Partner:
        """Return the counterpart.

        Raises RefusedError for a dial that waited too long, ConnectionError where this end hung up or spoke too early.
        """
        partner: asyncio.Future[_Partner] = asyncio.get_running_loop().create_future()
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
            raise RefusedError(f"no gateway of {request.site} waits here")
        raise ConnectionError("hung up")

    def _forget(self, partner: asyncio.Future[_Partner], request: Request) -> None:
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


async def _hung_up(connection: socket.socket) -> None:
    """Return when the connection ends, or says something before it may."""
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().sock_recv(connection, 1)


async def report_status(relay: Relay, every_seconds: float = STATUS_SECONDS) -> None:
    """Print the relay's status as a line of JSON every so often."""
    while True:
        await asyncio.sleep(every_seconds)
        print(json.dumps(relay.status), flush=True)
