"""The part of a group that lies in one site: gloo between its ranks, on the island's own store."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ReduceOptions, Store

from hetrl.errors import HetrlError


class IslandError(HetrlError):
    """An operation inside the island failed: a rank of this site is gone or late."""


class Island:
    """Two gloo groups over the same ranks: sums go up in one, results come down in the other.

    They are two so that both directions overlap: gloo matches calls by their order.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._closing: threading.Thread | None = None
        self._up: Any
        self._down: Any
        self._up, self._down = (
            dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout) for name in ("up", "down")
        )

    def reduce(self, tensor: torch.Tensor, root: int, operation: Any) -> asyncio.Future[None]:
        """Begin to reduce in place onto the island's rank `root`; the future ends with it."""
        options = ReduceOptions()
        options.rootRank, options.reduceOp = root, operation
        return _ended(self._up.reduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> asyncio.Future[None]:
        """Begin to overwrite the tensor with that of the island's rank `root`; the future ends with it."""
        options = BroadcastOptions()
        options.rootRank = root
        return _ended(self._down.broadcast([tensor], options))

    def close(self) -> None:
        """Close the connections, which ends what the other ranks of the island wait for."""
        if self._closing is None:
            groups = [self._up, self._down]
            self._up = self._down = None
            # The destructor waits for operations under way, which end when a peer closes or at gloo's own timeout.
            self._closing = threading.Thread(target=groups.clear, name="wan island close")
            self._closing.start()

    def join(self, seconds: float) -> None:
        """Wait for the connections to be closed, for so long at most."""
        if self._closing is not None:
            self._closing.join(seconds)


def _ended(work: Any) -> asyncio.Future[None]:
    """Return a future of this loop that ends with a work of gloo."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(cause: str | None) -> None:
        if not ended.done():
            ended.set_result(None) if cause is None else ended.set_exception(IslandError(cause))

    def on_done(future: Any) -> None:
        try:
            future.value()
            cause = None
        except RuntimeError as error:
            cause = f"gloo: {str(error).splitlines()[0]}"
        with suppress(RuntimeError):  # the loop is closed, nobody waits any more
            loop.call_soon_threadsafe(settle, cause)

    work.get_future().add_done_callback(on_done)
    ended.add_done_callback(lambda future: future.cancelled() or future.exception())  # nobody may be left to ask
    return ended
