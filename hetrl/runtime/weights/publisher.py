"""Send one weight version from a trainer to its receivers, and wait until all of them serve it.

take      piece by piece, in the engine's thread: the version becomes what is kept, and what changed is found
send      each piece as soon as it is taken, as fast as the links carry it, beside whatever the trainer does next
finish    wait for the word of every receiver
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
from msgspec import structs
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Buffer
from hetrl.runtime.transport.member import Envelope, Member, RunAborted
from hetrl.runtime.weights.digests import version_digest
from hetrl.runtime.weights.intake import PIECES_PER_THREAD, threads
from hetrl.runtime.weights.kept import Kept, words
from hetrl.runtime.weights.pieces import PIECE_BYTES, check_spec, piece_of, word_bytes
from hetrl.runtime.wire import changes

if TYPE_CHECKING:  # emulated engines have no torch
    import torch

APPLY_SECONDS = 600.0
SLOWEST_BYTES_PER_S = 1e8  # of writing, hashing and loading a version: a file system over the network


@dataclass(frozen=True)
class _Cut:
    """A piece as it goes: whole to those without the base, as `changes` (where they are fewer bytes) to the others."""

    message: wire.WeightsTensor
    changes: bytes | None = None
    words: int = 0
    changed: int = 0


class Publisher:
    """Streams the tensors of one `Publish`: its version becomes the one that is kept, and is sent from there.

    With encoding delta, the holders of the version that was kept before get what changed. A receiver that refuses what
    it got gets the full set, once.
    """

    def __init__(self, member: Member, request: wire.Publish, kept: Kept) -> None:
        self._member, self._request, self._kept = member, request, kept
        self._loop = asyncio.get_running_loop()
        self._receivers = [*request.receivers]
        self._left_out: list[str] = []
        self._cuts: asyncio.Queue[_Cut | None] = asyncio.Queue()  # None: all are taken
        self._applied, self._failed, self._repaired = dict[str, float](), dict[str, str](), dict[str, str]()
        self._start = time.monotonic()
        self._delta_bytes = self._words = self._changed = 0
        self._base, self._digest = (kept.version, kept.digest), kept.digest
        known = request.encoding == "delta" and kept.version is not None
        self._holders = frozenset(kept.holders if known else ()) & {*request.receivers}

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
                self._member.abandon(receiver, self._channel, cause)

        with self._member.links.told(look):
            look()
            yield

    def take(self, tensors: Iterable[tuple[str, torch.Tensor | NDArray[Any]]]) -> None:
        """Make these weights the version that is kept; called in the engine's thread, which waits for no link."""
        self._kept.version, self._kept.pieces, self._kept.holders = None, {}, set()  # until all of this one is kept
        under_way: deque[Future[_Cut]] = deque()
        count = threads()
        with ThreadPoolExecutor(count, thread_name_prefix="weights") as pool:
            for name, tensor in tensors:
                for work in self._works(name, tensor):
                    under_way.append(pool.submit(self._cut, *work))
                    if len(under_way) > PIECES_PER_THREAD * count:
                        self._give(under_way.popleft().result())
            while under_way:
                self._give(under_way.popleft().result())
        pieces = self._kept.pieces
        self._digest = version_digest({place: message.digest for place, message in pieces.items()})
        self._kept.digest, self._kept.version = self._digest, self._request.version
        self._loop.call_soon_threadsafe(self._cuts.put_nowait, None)

    def take_kept(self) -> None:
        """Send the version as it is kept; nobody has a base of it."""
        self._holders = frozenset()
        for message in self._kept.pieces.values():
            self._cuts.put_nowait(_Cut(message))
        self._cuts.put_nowait(None)

    async def send(self) -> None:
        """Announce the version and send every piece as soon as it is taken."""
        version = self._request.version
        await self._send(self._of(holders=False), wire.WeightsBegin(version=version))
        base, base_digest = self._base
        delta = wire.WeightsBegin(version=version, encoding="delta", base_version=base, base_digest=base_digest)
        await self._send(self._of(holders=True), delta)
        while (cut := await self._cuts.get()) is not None:
            await self._send_piece(cut)

    async def finish(self) -> wire.Published:
        """Close the version and wait for every receiver.

        One that fails, refuses the full set or computed another digest is among the `failed`; raises HetrlError when a
        quorum is wanted and nobody applied it.
        """
        receivers = tuple(self._receivers)
        await asyncio.gather(*(self._close(receiver) for receiver in receivers))
        told = [one for one in receivers if one not in self._left_out]
        applied = {one: self._applied[one] for one in told if one in self._applied}
        failed = {one: self._failed[one] for one in told if one in self._failed}
        self._kept.holders |= set(applied)
        if failed and not applied and self._request.quorum != 0:
            raise HetrlError("; ".join(failed.values()))
        return wire.Published(
            version=self._request.version,
            digest=self._digest,
            bytes=self._bytes,
            seconds=time.monotonic() - self._start,
            apply_seconds=applied,
            failed=failed,
            left_out=tuple(self._left_out),
            delta_bytes=self._delta_bytes if self._holders else None,
            changed=self._changed / self._words if self._holders and self._words else None,
            repaired=self._repaired,
        )

    @property
    def _channel(self) -> wire.Priority:
        return wire.priority_of(wire.WeightsBegin(version=self._request.version, gives_way=self._request.gives_way))

    @property
    def _bytes(self) -> int:
        return sum(message.bytes for message in self._kept.pieces.values())

    def _of(self, *, holders: bool) -> list[str]:
        """Return the receivers that have, or have not, the base of the delta."""
        return [one for one in self._receivers if (one in self._holders) == holders]

    def _works(
        self, name: str, tensor: torch.Tensor | NDArray[Any]
    ) -> Iterator[tuple[wire.TensorSpec, int, memoryview, bool]]:
        """Yield what `_cut` is to do for each piece of a tensor."""
        data = _bytes_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = wire.TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), bytes=data.nbytes)
        check_spec(spec, self._request.version)
        _, known = self._kept.room_for(spec)
        for offset in range(0, max(data.nbytes, 1), PIECE_BYTES):
            yield spec, offset, data[offset : offset + PIECE_BYTES], known

    def _cut(self, spec: wire.TensorSpec, offset: int, whole: memoryview, known: bool) -> _Cut:
        """Take the digest of a piece and find what changed in it; what is kept of it becomes the piece."""
        message = piece_of(self._request.version, spec, offset, whole)
        held, size = self._kept.tensors[spec.name][offset : offset + whole.nbytes], word_bytes(spec)
        if not (self._holders and known and size):
            held[:] = whole
            return _Cut(message)
        after = numpy.frombuffer(whole, numpy.uint8)
        payload = changes.encode(words(held, spec), words(after, spec))
        held[:] = after
        count, changed = whole.nbytes // size, changes.changed_words(payload)
        return _Cut(message, payload if len(payload) < whole.nbytes else None, count, changed)

    def _give(self, cut: _Cut) -> None:
        self._kept.pieces[cut.message.tensor.name, cut.message.offset] = cut.message
        self._loop.call_soon_threadsafe(self._cuts.put_nowait, cut)

    async def _send_piece(self, cut: _Cut) -> None:
        self._words, self._changed = self._words + cut.words, self._changed + cut.changed
        whole = self._kept.whole(cut.message)
        if cut.changes is None:
            self._delta_bytes += whole.nbytes
            await self._send(self._receivers, cut.message, [whole])
            return
        self._delta_bytes += len(cut.changes)
        await self._send(self._of(holders=True), structs.replace(cut.message, changes=True), [cut.changes])
        await self._send(self._of(holders=False), cut.message, [whole])

    async def _close(self, receiver: str) -> None:
        """Wait for the word of a receiver; one that refuses what it got gets the full set."""
        cause = await self._word_of(receiver)
        if cause is not None and receiver in self._receivers:
            self._repaired[receiver] = cause
            cause = await self._word_of(receiver, again=True)
        if cause is not None:
            self._failed[receiver] = f"{receiver}: {cause}"

    async def _repeat(self, receiver: str) -> None:
        """Send the full set, as it is kept."""
        await self._send([receiver], wire.WeightsBegin(version=self._request.version))
        for message in self._kept.pieces.values():
            await self._send([receiver], message, [self._kept.whole(message)])

    async def _word_of(self, receiver: str, *, again: bool = False) -> str | None:
        """Ask a receiver, sending the full set before where it is to come `again`, for its word on the version.

        Returns why it refused it. That it applied it, or failed, is noted.
        """
        version, tensors = self._request.version, len({name for name, _ in self._kept.pieces})
        behind = self._request.gives_way
        end = wire.WeightsEnd(
            version=version, tensors=tensors, bytes=self._bytes, digest=self._digest, gives_way=behind
        )
        doing = f"apply weight version {version}"
        try:
            if again:
                await self._repeat(receiver)
            seconds = APPLY_SECONDS + self._bytes / SLOWEST_BYTES_PER_S
            reply = await self._member.request(receiver, end, timeout_seconds=seconds, doing=doing)
        except RunAborted:
            raise
        except HetrlError as error:
            self._failed[receiver] = str(error)
            return None
        match reply:
            case Envelope(message=wire.WeightsApplied(digest=arrived, seconds=took)) if arrived == self._digest:
                self._applied[receiver] = took
                return None
        return _refusal(reply.message, version, self._digest)

    async def _send(
        self, receivers: Sequence[str], message: wire.TravellingWeights, buffers: Sequence[Buffer] = ()
    ) -> None:
        if to := [one for one in receivers if one in self._receivers]:
            await self._member.send(to, structs.replace(message, gives_way=self._request.gives_way), buffers)


def _bytes_of(tensor: torch.Tensor | NDArray[Any]) -> memoryview:
    """Return the bytes of a tensor in the order of its elements; not a copy where it is contiguous."""
    if isinstance(tensor, numpy.ndarray):
        return numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8).data
    import torch

    data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return data


def _refusal(answer: wire.Message, version: int, digest: str) -> str:
    """Return why a receiver that answers so has not the version of this digest."""
    match answer:
        case wire.WeightsApplied(digest=arrived):
            return f"weight version {version} arrived as {arrived}, sent as {digest}"
        case wire.WeightsRejected(cause=cause):
            return f"refused weight version {version}: {cause}"
        case other:
            return f"answered {type(other).__name__} to weight version {version}"
