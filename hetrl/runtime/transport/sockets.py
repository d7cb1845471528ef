"""What the sockets of gateways and members have in common: CURVE, liveness, small queues, a place in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from hetrl.runtime.transport.chunks import CHUNK_BYTES
from hetrl.runtime.transport.liveness import (
    KEEP_ALIVE_COUNT,
    KEEP_ALIVE_IDLE_SECONDS,
    KEEP_ALIVE_SECONDS,
    UNACKNOWLEDGED_MS,
)
from hetrl.runtime.wire.keys import SiteKeys

LINGER_SECONDS = 2.0  # from closing a socket to losing what it still holds
# Messages that ZeroMQ may hold per connection and direction; they are at most a chunk long. A stream of a link holds
# one: what a slow stream holds at the end of a transfer, no other one can carry.
QUEUE_MESSAGES, STREAM_QUEUE_MESSAGES = 16, 1

# A header names its receivers; 64 KiB is room for a thousand.
_FRAME_BYTES = CHUNK_BYTES + 2**16
# Whoever connects and does not finish the handshake is hung up on: a scan of ports must not hold connections open.
_CONNECT_MS, _HANDSHAKE_MS = 5_000, 10_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2_000
_BURST = 64  # messages read before anybody else in the event loop gets a turn

UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
DOWN = zmq.EVENT_DISCONNECTED
ACCEPTED, CONNECTED = zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED
# As plain numbers: those of an enum take longer to combine than the socket to answer.
_READABLE, _WRITABLE, _AT_ONCE = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.DONTWAIT)


def client_socket(
    context: zmq.Context[Any], keys: SiteKeys, server_key: str, queue_messages: int = QUEUE_MESSAGES
) -> zmq.Socket[bytes]:
    """Make a DEALER that speaks only to the owner of `server_key` and reconnects by itself."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    _bound(socket, queue_messages)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = server_key.encode()
    return socket


def server_socket(context: zmq.Context[Any], keys: SiteKeys) -> zmq.Socket[bytes]:
    """Make a ROUTER that requires CURVE and refuses to send to a peer that is not there."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    _bound(socket, QUEUE_MESSAGES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_server = True
    return socket


def _bound(socket: zmq.Socket[bytes], queue_messages: int) -> None:
    """Limit how long a peer may be silent, and how much it may make us hold.

    ZeroMQ's own heartbeats are not used: libzmq 4.3.5 aborts the process where one is due on a connection that broke
    while the queue was full (its pull request 4852).
    """
    # The kernel's buffers are left as they are: asking for a size (ZMQ_SNDBUF) switches off their tuning.
    socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEP_ALIVE_IDLE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEP_ALIVE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEP_ALIVE_COUNT)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, queue_messages)
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.LINGER, int(LINGER_SECONDS * 1000))


class Port:
    """A socket in the event loop: `heard` gets every message, `ready` is called whenever a full socket may have room.

    The file descriptor of a ZeroMQ socket tells only that something happened, and sending may use that up
    (http://api.zeromq.org/4-3:zmq-getsockopt, ZMQ_FD): so the socket is read until it is empty after either.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        heard: Callable[[list[zmq.Frame]], None],
        ready: Callable[[], object] = lambda: None,
        *,
        changed: Callable[[int], None] | None = None,
        connected: Callable[[int], object] = lambda descriptor: None,
        failed: Callable[[Exception], None],
    ) -> None:
        """Watch a socket; `changed` gets ACCEPTED, UP (the handshake is through) or DOWN for each of its connections.

        With it, `connected` gets the descriptor of each connection that the socket makes. What a callback raises is a
        defect and goes to `failed`.
        """
        self._socket, self._heard, self._ready, self._failed = socket, heard, ready, failed
        self._loop = asyncio.get_running_loop()
        self._scheduled = self._turning = self._closed = False
        self._full = False  # so that a full socket is not asked again before it says that it has room
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._turn)
        self._monitor = None if changed is None else _monitor(socket, changed, connected, failed)
        self.look()

    def send(self, frames: Sequence[Any]) -> bool:
        """Hand a message to the socket if it can take it now; raises zmq.ZMQError as the socket does."""
        if self._full:
            return False
        try:
            self._socket.send_multipart(frames, flags=_AT_ONCE, copy=False)
        except zmq.Again:
            # A ROUTER has room for others when it has none for one: only its own answer counts.
            self._full = not self._events & _WRITABLE
            return False
        finally:
            if not self._turning:
                self.look()
        return True

    def close(self, linger_seconds: float) -> None:
        """Close the socket; what it holds may still go for `linger_seconds`."""
        self._closed = True
        if self._monitor is not None:
            self._socket.disable_monitor()  # first: ZeroMQ would wait for ever to tell a monitor that is closed
            self._monitor.close(0)
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=int(linger_seconds * 1000))

    def look(self) -> None:
        """Look soon at what the socket has: needed after every other use of it, which may take up its signal."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Read what is there, at most a burst of it, then let senders go on."""
        self._scheduled = False
        if self._closed:
            return
        self._turning = True
        try:
            events = self._read()
            self._full = self._full and not events & _WRITABLE
            if not self._full:
                self._ready()
        except Exception as error:
            self._failed(error)
        self._turning = False
        # What sending used up above: a socket that has something to read, or room again, says so only here.
        if not self._closed and self._events & (_READABLE | (_WRITABLE if self._full else 0)):
            self.look()

    @property
    def _events(self) -> int:
        return int(self._socket.getsockopt(zmq.EVENTS))

    def _read(self) -> int:
        """Read a burst of what is there; return the socket's events behind it."""
        events, left = self._events, _BURST
        while events & _READABLE and left:  # asked first: an exception that says "nothing" takes longer
            try:
                frames = self._socket.recv_multipart(flags=_AT_ONCE, copy=False)
            except zmq.Again:  # the connection ended in between
                break
            self._heard(frames)
            events, left = self._events, left - 1
        return events


def _monitor(
    socket: zmq.Socket[bytes],
    changed: Callable[[int], None],
    connected: Callable[[int], object],
    failed: Callable[[Exception], None],
) -> Port:
    def tell(frames: list[zmq.Frame]) -> None:
        told = parse_monitor_message([frame.bytes for frame in frames])
        if told["event"] == CONNECTED:
            connected(int(told["value"]))
        else:
            changed(int(told["event"]))

    return Port(socket.get_monitor_socket(ACCEPTED | CONNECTED | UP | DOWN), tell, failed=failed)
