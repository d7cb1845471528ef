"""Who may stand at a relay's door, so that nobody can keep others out by standing there.

Connections that have not shown a key are few, and none is refused for coming late: the oldest one goes, of the address
that has most of them. A gateway that sends its request at once is through before that is itself. Connections that have
shown one are bounded in all and per address.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

STRANGERS = 128
# Between two that come: whoever comes stays for at least STRANGERS times as long, which is more than the way there and
# back that a request takes.
PAUSE_SECONDS = 0.002
_NETWORK_BITS = 64  # of IPv6: what one host may have for itself (RFC 6177)


class RefusedError(Exception):
    """Whoever is on the connection gets one line, which says why, and nothing else."""


@dataclass(eq=False)
class _Stranger:
    address: str
    deadline: asyncio.Timeout
    in_the_way: bool = False


class Door:
    """Counts the connections of each address: at most `connections` with a key, `per_address` of them of one."""

    def __init__(self, connections: int, per_address: int) -> None:
        self._connections, self._per_address = connections, per_address
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._admitted: Counter[str] = Counter()

    @property
    def strangers(self) -> int:
        """Return the number of connections that have not shown a key."""
        return len(self._strangers)

    @contextmanager
    def greeted(self, address: str, deadline: asyncio.Timeout) -> Iterator[None]:
        """Let somebody show a key before `deadline`, which comes early where he stands in others' way.

        Raises RefusedError where it passed.
        """
        stranger = _Stranger(address, deadline)
        self._make_room(address)
        self._strangers[stranger] = None
        try:
            yield
        except asyncio.CancelledError:
            if stranger.in_the_way:
                raise RefusedError("too many connections without a request; the oldest go first") from None
            raise
        finally:
            self._strangers.pop(stranger, None)

    def _make_room(self, address: str) -> None:
        if len(self._strangers) < STRANGERS:
            return
        standing = Counter([address, *(stranger.address for stranger in self._strangers)])
        most = max(standing.values())
        oldest = next(stranger for stranger in self._strangers if standing[stranger.address] == most)
        del self._strangers[oldest]
        oldest.in_the_way = True
        with suppress(RuntimeError):  # its time is up at this very moment
            oldest.deadline.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def admitted(self, address: str) -> Iterator[None]:
        """Count a connection that has shown a key, while it is open. Raises RefusedError where there are too many."""
        if self._admitted.total() >= self._connections:
            raise RefusedError("too many connections")
        if self._admitted[address] >= self._per_address:
            raise RefusedError(f"too many connections from {address}")
        self._admitted[address] += 1
        try:
            yield
        finally:
            self._admitted[address] -= 1
            self._admitted += Counter()  # addresses that have none


def address_of(connection: socket.socket) -> str:
    """Return the address that a connection is counted under: a host's, of IPv6 its network's. "gone" where it ended."""
    try:
        host = str(connection.getpeername()[0])
        address = ipaddress.ip_address(host.partition("%")[0])
    except (OSError, ValueError):
        return "gone"
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, _NETWORK_BITS), strict=False))
