"""What the sockets of gateways and members have in common: CURVE, liveness, framing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from hetrl.runtime import wire
from hetrl.runtime.keys import SiteKeys

LINGER_SECONDS = 2.0
NO_ANSWER = 0  # the id of a message whose source wants no word about it, not even Undeliverable

# A peer that is silent for so long is disconnected (ZMTP PING/PONG, https://rfc.zeromq.org/spec/37/).
_PING_MS, _PONG_TIMEOUT_MS = 2_000, 15_000
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 2_000


def gateway_of(site: str) -> str:
    """Return the address of the gateway of a site."""
    return wire.address(site, "gateway")


def client_socket(context: zmq.asyncio.Context, keys: SiteKeys, server_key: str) -> zmq.asyncio.Socket:
    """Make a DEALER that speaks only to the owner of `server_key` and reconnects by itself."""
    socket = context.socket(zmq.DEALER)
    _set_liveness(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = server_key.encode()
    return socket


def server_socket(context: zmq.asyncio.Context, keys: SiteKeys) -> zmq.asyncio.Socket:
    """Make a ROUTER that requires CURVE and refuses to send to a peer that is not there."""
    socket = context.socket(zmq.ROUTER)
    _set_liveness(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_publickey = keys.public.encode()
    socket.curve_server = True
    return socket


def sizes(frames: Sequence[Any]) -> int:
    """Return the bytes of frames, be they zmq frames, bytes or buffers."""
    return sum(memoryview(frame).nbytes for frame in frames)


def _set_liveness(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, int(LINGER_SECONDS * 1000))
