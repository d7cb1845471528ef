"""Weight versions as they arrive at a member: decoded, written and hashed on threads, beside its event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hetrl.errors import HetrlError
from hetrl.runtime.transport.chunks import Buffer
from hetrl.runtime.weights.node_share import NodeShare
from hetrl.runtime.weights.weight_file import WeightFile
from hetrl.runtime.wire import WeightsBegin, WeightsEnd, WeightsTensor

MOST_THREADS = 8  # hashing and writing is bound by the node's memory soon after
PIECES_PER_THREAD = 2  # under way: what is held in memory besides the file
SHARE_SECONDS = 120.0  # until a replica no longer counts on the one that takes versions for its node
# Looks for the file of another replica: hundreds may wait on one machine, so that those that wait long look less often.
_POLL_SECONDS, _LONGEST_POLL_SECONDS, _POLL_GROWTH = 0.02, 1.0, 1.25


def threads() -> int:
    """Return on how many threads weights are hashed and packed: the cores that this process may use, up to 8."""
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)


class Intake:
    """Gives what arrives, in its order, to a weight file; a piece is written while the next ones arrive.

    Of those that share a node, one takes a version, and the others wait for its file and link to it. One that waits in
    vain refuses the version, and takes the next ones, the full set of this one first, by itself.
    """

    def __init__(self, file: WeightFile, share: NodeShare | None = None) -> None:
        self._file, self._share, self._count = file, share, threads()
        self._follows = False  # another replica of the node takes the version that arrives
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="weights")
        self._writing: set[asyncio.Future[None]] = set()
        self._cause: str | None = None  # of the version that arrives

    @property
    def node(self) -> str:
        """Return what names the files that it shares with others of its node; empty where it does not."""
        return f"{socket.gethostname()}:{self._share.directory}" if self._share is not None else ""

    @property
    def follows(self) -> bool:
        """Return whether another replica of the node took the last version for it."""
        return self._share is not None and self._follows

    async def begin(self, begin: WeightsBegin) -> None:
        """Start a version; raises what `WeightFile.begin` does."""
        await self._settle()
        self._cause = None
        self._follows = self._share is not None and not self._share.leads()
        if not self._follows:
            self._file.begin(begin)

    async def add(self, message: WeightsTensor, buffer: Buffer) -> None:
        """Take one piece; returns when there is room for the next. Raises what `WeightFile.admit` does."""
        if self._follows:
            return
        piece = self._file.admit(message, memoryview(buffer).nbytes)
        if piece is None or self._cause is not None:
            return
        while len(self._writing) >= PIECES_PER_THREAD * self._count:
            await asyncio.wait(self._writing, return_when=asyncio.FIRST_COMPLETED)
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._threads, self._file.write, piece, buffer)
        self._writing.add(writing)
        writing.add_done_callback(self._written)

    async def end(self, end: WeightsEnd) -> tuple[Path, str]:
        """Close the version, once all of it is written; returns and raises what `WeightFile.end` does."""
        if self._share is not None and self._follows:
            return await self._follow(end, self._share)
        await self._settle()
        if self._cause is not None:
            self._file.reject(self._cause)
        path, digest = await asyncio.to_thread(self._file.end, end)
        if self._share is not None:
            self._share.offer(path, end.version, digest)
        return path, digest

    async def _follow(self, end: WeightsEnd, share: NodeShare) -> tuple[Path, str]:
        """Wait for the file of the replica that takes versions for this node, and make it this one's, too.

        That is in vain where it has a newer one already.
        """
        deadline, pause_seconds = time.monotonic() + SHARE_SECONDS, _POLL_SECONDS
        while time.monotonic() < deadline and not share.leads():
            if (path := share.find(end.version, end.digest)) is not None:
                return await asyncio.to_thread(self._file.adopt, path, end.version, end.digest), end.digest
            if share.newest() > end.version:
                break
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(_POLL_GROWTH * pause_seconds, _LONGEST_POLL_SECONDS)
        if not share.leads():
            self._share = None
        raise HetrlError(f"weight version {end.version}: the replica that takes it for this node does not have it")

    async def _settle(self) -> None:
        while self._writing:
            await asyncio.wait(self._writing)

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._writing.discard(writing)
        error = None if writing.cancelled() else writing.exception()
        if isinstance(error, HetrlError):
            self._cause = self._cause or str(error)
        elif error is not None:
            self._cause = self._cause or repr(error)
