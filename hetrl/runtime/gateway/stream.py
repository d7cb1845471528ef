"""One connection of a link to another site's gateway, which comes back by itself.

lost after it was up    ZeroMQ connects again at once
ends before it is up    something answers that is not the gateway, such as an ssh tunnel without a gateway at its end:
                        the next attempt waits, each time longer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from hetrl.runtime.gateway.link_report import LinkReport
from hetrl.runtime.transport.sockets import DOWN, UP, Port, watch

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0


class Stream:
    """Sends over a DEALER to `endpoint`; the log has each change of `report`'s link once."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        report: LinkReport,
        pump: Callable[[], object],
        restored: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Connect; `pump` is called when there may be room, `restored` when a connection that was up is up again."""
        self._socket, self._endpoint, self._report, self._restored = socket, endpoint, report, restored
        self._is_up = self._was_up = self._troubled = False
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._attempt: asyncio.TimerHandle | None = None
        self._port = Port(socket, lambda frames: None, pump, failed=failed)
        self._monitor = watch(socket, self._changed, failed=failed)
        socket.connect(endpoint)

    def send(self, frames: Sequence[Any]) -> bool:
        """Hand a message to the connection if it can take it now."""
        return self._port.send(frames)

    def close(self, linger_seconds: float) -> None:
        """Close; what the connection holds may still go for `linger_seconds`."""
        if self._attempt is not None:
            self._attempt.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._port.close(linger_seconds)

    def _changed(self, event: int) -> None:
        if event == UP:
            self._is_up, self._pause_seconds = True, FIRST_PAUSE_SECONDS
            if self._troubled:
                self._report.up()
            if self._was_up:
                self._restored()
            self._was_up = True
        elif event == DOWN and self._is_up:
            self._is_up = False
            self._trouble("the connection was lost")
        elif event == DOWN and self._attempt is None:
            self._trouble("connections end before the other gateway answers")
            self._socket.disconnect(self._endpoint)
            self._port.look()
            self._attempt = asyncio.get_running_loop().call_later(self._pause_seconds, self._try_again)
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def _trouble(self, what: str) -> None:
        self._troubled = True
        self._report.down(what)

    def _try_again(self) -> None:
        self._attempt = None
        self._socket.connect(self._endpoint)
        self._port.look()
