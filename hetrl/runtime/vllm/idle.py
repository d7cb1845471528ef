"""What a vLLM server does with its devices while other tasks of its group have their turn.

    resident    keeps all; its requests stop where they are
    sleep       gives up keys and values; the contexts of its requests are computed anew
    offload     gives up the weights as well: level 1 keeps a copy in the host's memory, level 2 keeps none

See https://docs.vllm.ai/en/latest/features/sleep_mode/. A server on a CPU stops, and keeps its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from hetrl.runtime.vllm.server import VllmServer

log = logging.getLogger(__name__)

# The first sleep that keeps weights pins as much of the host's memory as they take, a few GB a second: above a minute
# for the largest that fit a GPU.
MOVE_SECONDS = 600.0


class Idle:
    """Puts one server to sleep and wakes it; requests under way are held in between."""

    def __init__(self, server: VllmServer, device: str) -> None:
        """`device` is cpu or cuda."""
        self._server, self._on_gpu = server, device == "cuda"
        self._state: str | None = None  # of a server that sleeps
        self._told = False

    @property
    def asleep(self) -> bool:
        """Return whether the server sleeps."""
        return self._state is not None

    async def sleep(self, idle_state: str, *, keep_weights: bool) -> bool:
        """Free what `idle_state` says; return whether the server still has its weights.

        Raises HetrlError where the server cannot.
        """
        self._state = idle_state
        if idle_state == "offload":
            await self._moves(f"/sleep?level={1 if keep_weights else 2}&mode=keep")
        else:
            await self._server.pause(forget=idle_state == "sleep")
        if not self._on_gpu:
            self._tell(idle_state)
        elif idle_state == "sleep":
            await self._server.call("/release_kv_cache_memory")
        elif idle_state == "resident":
            await self._server.call("/collective_rpc", {"method": "release_cached_memory"})
        return keep_weights or idle_state != "offload"

    async def wake(self, load: Callable[[], Awaitable[None]]) -> None:
        """Take the devices back and let requests continue; `load` is called when there is room for weights."""
        state, self._state = self._state, None
        if state == "offload":
            await self._moves("/wake_up?tags=weights")
        await load()
        if state == "offload" or (state == "sleep" and self._on_gpu):
            await self._moves("/wake_up?tags=kv_cache")  # requests continue, too
        else:
            await self._server.resume()

    async def _moves(self, route: str) -> None:
        await self._server.call(route, timeout_seconds=MOVE_SECONDS)

    def _tell(self, idle_state: str) -> None:
        if not self._told and idle_state != "resident":
            log.info("idle_state %s: a server on a CPU stops, and keeps its memory", idle_state)
        self._told = True
