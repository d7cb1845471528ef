"""Who may connect to a gateway (ZAP, https://rfc.zeromq.org/spec/27/).

over TCP            whoever has a key of the run (CURVE)
over a unix socket  processes of the gateway's own user, as the kernel says (SO_PEERCRED, unix(7))
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils import z85

from hetrl.runtime.transport.endpoints import UNIX_DOMAIN
from hetrl.runtime.transport.sockets import Port

_ENDPOINT = "inproc://zeromq.zap.01"
_LOG_SECONDS = 1.0  # at most one line about refusals per so long: a scan of ports must not fill the log

_log = logging.getLogger(__name__)


class ZapHandler:
    """Answers for the sockets of a context whether a client may connect, and which site it belongs to.

    The site becomes the `User-Id` of every message from that connection.
    """

    def __init__(self, site: str, site_by_key: Mapping[str, str]) -> None:
        self.refused = 0
        self._site, self._site_by_key = site, site_by_key
        self._logged_seconds = -_LOG_SECONDS

    def open(self, context: zmq.Context[Any], *, failed: Callable[[Exception], None]) -> None:
        """Start to answer; do this before any server socket of the context binds."""
        socket = context.socket(zmq.REP)
        socket.bind(_ENDPOINT)
        self._port = Port(socket, self._answer, failed=failed)

    def close(self) -> None:
        """Answer nobody any more."""
        self._port.close(0)

    def _answer(self, frames: list[zmq.Frame]) -> None:
        version, sequence, domain, address, _identity, mechanism, *credentials = (frame.bytes for frame in frames)
        where = address.decode(errors="replace")
        site = ""
        if mechanism == b"CURVE" and len(credentials) == 1:
            site = self._site_by_key.get(z85.encode(credentials[0]).decode(), "")
        elif mechanism == b"NULL" and domain == UNIX_DOMAIN.encode() and _user_of(where) == os.geteuid():
            site = self._site
        if not site:
            self._refuse(where)
        status, text = (b"200", b"OK") if site else (b"400", b"not of this run")
        self._port.send([version, sequence, status, text, site.encode(), b""])

    def _refuse(self, address: str) -> None:
        self.refused += 1
        if (now := time.monotonic()) - self._logged_seconds >= _LOG_SECONDS:
            self._logged_seconds = now
            _log.warning(
                "%s: refused a connection from %s, which is not of this run (%d so far)",
                self._site,
                address,
                self.refused,
            )


def _user_of(address: str) -> int | None:
    """Return the user at the other end of a unix socket; ZeroMQ writes it as `localhost:UID:GID:PID`."""
    *_, user, _group, _process = ("", "", "", *address.split(":"))
    return int(user) if user.isdecimal() else None
