"""Send one weight version from a trainer to its receivers, tensor by tensor, and wait until all of them serve it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Buffer
from hetrl.runtime.transport.member import Envelope, Member, RunAborted
from hetrl.runtime.weights.weight_file import digest_of_digests, pieces

CHUNK_BYTES = 4 * 2**20
APPLY_SECONDS = 600.0


class Publisher:
    """Streams the tensors of one `Publish`; nothing larger than one tensor is held at a time."""

    def __init__(self, member: Member, request: wire.Publish, loop: asyncio.AbstractEventLoop) -> None:
        self._member, self._request, self._loop = member, request, loop
        self._receivers = [*request.receivers]
        self._left_out: list[str] = []
        self._digests: dict[str, str] = {}
        self._bytes = 0
        self._start = time.monotonic()

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Leave receivers out whose link is out, or goes out, as long as the quorum is left without them."""

        def look(_: str | None = None) -> None:
            out = [one for one in self._receivers if self._member.links.are_out(one)]
            if self._request.quorum is None or len(self._receivers) - len(out) < self._request.quorum:
                return
            for receiver in out:
                self._receivers.remove(receiver)
                self._left_out.append(receiver)
                cause = f"the link to {wire.site_of(receiver)} is out"
                self._member.abandon(receiver, wire.Priority.WEIGHTS, cause)

        with self._member.links.told(look):
            look()
            yield

    async def begin(self) -> None:
        """Announce the version."""
        begin = wire.WeightsBegin(version=self._request.version, encoding=self._request.encoding)
        await self._send(begin)

    def send_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send every tensor; called in the engine's thread, which waits whenever a link has enough to do."""
        for name, tensor in tensors:
            asyncio.run_coroutine_threadsafe(self._send_tensor(name, tensor), self._loop).result()

    async def _send_tensor(self, name: str, tensor: torch.Tensor) -> None:
        data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        dtype = str(tensor.dtype).removeprefix("torch.")
        for message, buffer in pieces(self._request.version, name, dtype, tuple(tensor.shape), data, CHUNK_BYTES):
            self._digests[name] = message.digest
            await self._send(message, [buffer])
        self._bytes += data.nbytes

    async def _send(self, message: wire.Message, buffers: Sequence[Buffer] = ()) -> None:
        if self._receivers:
            await self._member.send(self._receivers, message, buffers)

    async def finish(self) -> wire.Published:
        """Close the version and wait for every receiver.

        One that fails, refuses the version or computed another digest is among the `failed`; raises HetrlError when a
        quorum is wanted and nobody applied it.
        """
        version, digest = self._request.version, digest_of_digests(self._digests)
        end = wire.WeightsEnd(version=version, tensors=len(self._digests), bytes=self._bytes, digest=digest)
        receivers, doing = tuple(self._receivers), f"apply weight version {version}"
        asked = (self._member.request(to, end, timeout_seconds=APPLY_SECONDS, doing=doing) for to in receivers)
        applied, failed = dict[str, float](), dict[str, str]()
        for receiver, reply in zip(receivers, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            match reply:
                case _ if receiver in self._left_out:
                    continue
                case Envelope(message=wire.WeightsApplied(digest=arrived, seconds=seconds)) if arrived == digest:
                    applied[receiver] = seconds
                case Envelope(message=other):
                    failed[receiver] = f"{receiver}: {_refusal(other, version, digest)}"
                case HetrlError() as error if not isinstance(error, RunAborted):
                    failed[receiver] = str(error)
                case BaseException() as error:
                    raise error
        if failed and not applied and self._request.quorum != 0:
            raise HetrlError("; ".join(failed.values()))
        return wire.Published(
            version=version,
            digest=digest,
            bytes=self._bytes,
            seconds=time.monotonic() - self._start,
            apply_seconds=applied,
            failed=failed,
            left_out=tuple(self._left_out),
        )


def _refusal(answer: wire.Message, version: int, digest: str) -> str:
    """Return why a receiver that answers so has not the version of this digest."""
    match answer:
        case wire.WeightsApplied(digest=arrived):
            return f"weight version {version} arrived as {arrived}, sent as {digest}"
        case wire.WeightsRejected(cause=cause):
            return f"refused weight version {version}: {cause}"
        case other:
            return f"answered {type(other).__name__} to weight version {version}"
