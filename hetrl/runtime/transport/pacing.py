"""TCP that spreads what it sends over a round trip, instead of sending it in bursts.

Acknowledgements that wait behind the data of the other direction arrive together, and each lets a packet go: a burst,
of which a short queue on the way drops the end (L. Zhang, S. Shenker, D. Clark, "Observations on the dynamics of a
congestion control algorithm: the effects of two-way traffic", SIGCOMM 1991). Linux paces a connection to 1.2 times its
window per round trip, 2 in slow start, once it has been given any upper limit (`SO_MAX_PACING_RATE`, socket(7)): with
every congestion control and, from 4.13 on, every queueing discipline.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress

_SO_MAX_PACING_RATE = 47  # Linux, asm-generic/socket.h; Python has no name for it
_BYTES_PER_SECOND = 2**31 - 1  # more than a stream carries: the greatest number that every kernel takes


def pace(connection: socket.socket) -> None:
    """Let a connection send evenly; one of another family than TCP's, or of another system, stays as it is."""
    if sys.platform == "linux":
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, _BYTES_PER_SECOND)


def pace_descriptor(descriptor: int) -> None:
    """Let a connection of ZeroMQ send evenly; nothing happens where it is closed by now."""
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            pace(connection)
        finally:
            connection.detach()  # it stays ZeroMQ's
