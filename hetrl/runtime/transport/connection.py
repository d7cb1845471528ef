"""The two connections of a member to its gateway: one for control messages, which wait for nothing, one for bulk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq

from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Buffer
from hetrl.runtime.transport.endpoints import connect_unix, unix_socket_of
from hetrl.runtime.transport.lane import Attempt, Lane, Parcel
from hetrl.runtime.transport.sockets import DOWN, LINGER_SECONDS, UP, Port, client_socket
from hetrl.runtime.wire.keys import SiteKeys


class Connection:
    """Sends what it is given as soon as the gateway takes it, and reconnects by itself.

    It takes the gateway's unix socket where there is one, else TCP. A gateway that comes up later has its unix socket
    by the time that it answers over TCP: the connection then changes over.
    """

    def __init__(
        self,
        gateway: str,
        directory: Path | None,
        keys: SiteKeys,
        heard: Callable[[list[zmq.Frame]], None],
        connected: Callable[[bool], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Connect to the TCP endpoint `gateway`, or to the unix socket that it has in `directory`.

        `heard` gets every message, `connected` whether a connection had been lost before, each time that one is up.
        """
        self._context: zmq.Context[Any] = zmq.Context()
        self._connected, self._lost = connected, False
        self._sockets = [client_socket(self._context, keys, keys.public) for _ in range(2)]
        self._lanes = [Lane(self._attempt_of(number)) for number in range(2)]
        self._hellos: list[Sequence[Buffer]] = [[], []]  # those that wait for room
        self._ports = [
            Port(socket, heard, functools.partial(self._pump, number), changed=self._changed, failed=failed)
            for number, socket in enumerate(self._sockets)
        ]
        self._gateway, self._directory = gateway, directory
        self._is_unix = self._take_unix_socket()
        if not self._is_unix:
            for socket in self._sockets:
                socket.connect(gateway)

    def _take_unix_socket(self) -> bool:
        """Connect to the unix socket, if it is there."""
        path = self._directory and unix_socket_of(self._directory, self._gateway)
        if path is None:
            return False
        for socket in self._sockets:
            connect_unix(socket, path)
        return True

    def _change_over(self) -> bool:
        """Leave TCP for the unix socket, if it is there; what TCP still held is lost, and sent again."""
        if self._is_unix or not self._take_unix_socket():
            return False
        self._is_unix = self._lost = True
        for socket in self._sockets:
            socket.disconnect(self._gateway)
        return True

    def send(self, header: wire.Header, frames: Sequence[Buffer]) -> None:
        """Queue a message; what bounds the queue is the windows of its receivers."""
        bulk = header.priority is not wire.Priority.CONTROL
        self._lanes[bulk].offer(Parcel(header, frames, header.to, 0))

    def greet(
        self, header: wire.Header, *, chunks_resent: int, chunks_duplicate: int, offences: Mapping[str, int]
    ) -> None:
        """Tell the gateway on each connection whose it is, ahead of all that waits."""
        for number, bulk in enumerate((False, True)):
            hello = wire.Hello(
                bulk=bulk, chunks_resent=chunks_resent, chunks_duplicate=chunks_duplicate, offences=dict(offences)
            )
            self._hellos[number] = wire.encode(header, hello)
        self.pump()

    def pump(self) -> None:
        """Send what waits."""
        for number in range(2):
            self._pump(number)

    def close(self) -> zmq.Context[Any]:
        """Close; what the sockets hold may still go while the context that is returned is terminated."""
        for port in self._ports:
            port.close(LINGER_SECONDS)
        return self._context

    def _attempt_of(self, number: int) -> Callable[[Parcel], Attempt]:
        def attempt(parcel: Parcel) -> Attempt:
            sent = self._greeted(number) and self._ports[number].send(parcel.frames)
            return Attempt.SENT if sent else Attempt.BUSY

        return attempt

    def _greeted(self, number: int) -> bool:
        """Send the hello that waits; return whether none does."""
        if self._hellos[number] and self._ports[number].send(self._hellos[number]):
            self._hellos[number] = []
        return not self._hellos[number]

    def _pump(self, number: int) -> None:
        if self._greeted(number):
            self._lanes[number].pump()

    def _changed(self, event: int) -> None:
        if event == DOWN:
            self._lost = True
        elif event == UP and not self._change_over():
            lost, self._lost = self._lost, False
            self._connected(lost)
