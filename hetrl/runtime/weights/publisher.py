"""Send one weight version from a trainer to its receivers, tensor by tensor, and wait until all of them serve it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import torch

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.weight_file import digest_of_digests, pieces

CHUNK_BYTES = 4 * 2**20
APPLY_SECONDS = 600.0


class Publisher:
    """Streams the tensors of one `Publish`; nothing larger than one tensor is held at a time."""

    def __init__(self, member: Member, request: wire.Publish, loop: asyncio.AbstractEventLoop) -> None:
        self._member, self._request, self._loop = member, request, loop
        self._digests: dict[str, str] = {}
        self._bytes = 0
        self._start = time.monotonic()

    async def begin(self) -> None:
        """Announce the version."""
        begin = wire.WeightsBegin(version=self._request.version, encoding=self._request.encoding)
        await self._member.send(self._request.receivers, begin)

    def send_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send every tensor; called in the engine's thread, which waits whenever a link has enough to do."""
        for name, tensor in tensors:
            asyncio.run_coroutine_threadsafe(self._send(name, tensor), self._loop).result()

    async def _send(self, name: str, tensor: torch.Tensor) -> None:
        data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        dtype = str(tensor.dtype).removeprefix("torch.")
        for message, buffer in pieces(self._request.version, name, dtype, tuple(tensor.shape), data, CHUNK_BYTES):
            self._digests[name] = message.digest
            await self._member.send(self._request.receivers, message, [buffer])
        self._bytes += data.nbytes

    async def finish(self) -> wire.Published:
        """Close the version and wait for every receiver; raises HetrlError when one computed another digest."""
        version, digest = self._request.version, digest_of_digests(self._digests)
        end = wire.WeightsEnd(version=version, tensors=len(self._digests), bytes=self._bytes, digest=digest)
        receivers, doing = self._request.receivers, f"apply weight version {version}"
        asked = (self._member.request(to, end, timeout_seconds=APPLY_SECONDS, doing=doing) for to in receivers)
        applied: dict[str, float] = {}
        for receiver, reply in zip(receivers, await asyncio.gather(*asked), strict=True):
            match reply.message:
                case wire.WeightsApplied(digest=arrived, seconds=seconds) if arrived == digest:
                    applied[receiver] = seconds
                case wire.WeightsApplied(digest=arrived):
                    raise HetrlError(f"{receiver}: weight version {version} arrived as {arrived}, sent as {digest}")
                case wire.WeightsRejected(cause=cause):
                    raise HetrlError(f"{receiver}: refused weight version {version}: {cause}")
                case other:
                    raise HetrlError(f"{receiver}: answered {type(other).__name__} to weight version {version}")
        seconds = time.monotonic() - self._start
        return wire.Published(version=version, digest=digest, bytes=self._bytes, seconds=seconds, apply_seconds=applied)
