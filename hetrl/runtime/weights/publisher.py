"""Send one weight version from a trainer to its receivers, and wait until all of them serve it.

take      piece by piece, in the engine's thread: the version becomes what is kept, and what changed is found
send      each piece as soon as it is taken, as fast as the links carry it, beside whatever the trainer does next
finish    wait for the word of every receiver
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
from msgspec import structs
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.exchange import WINDOW_BYTES
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.runtime.weights.digests import version_digest
from hetrl.runtime.weights.intake import PIECES_PER_THREAD, threads
from hetrl.runtime.weights.kept import DELTAS_SHARE, Cut, Delta, Kept, words
from hetrl.runtime.weights.party import Party, RefusedError
from hetrl.runtime.weights.pieces import PIECE_BYTES, check_spec, piece_of, word_bytes
from hetrl.runtime.wire import changes

if TYPE_CHECKING:  # emulated engines have no torch
    import torch

_LOOK_SECONDS = 1.0  # between looks for whoever holds the others up


class Publisher:
    """Streams the tensors of one `Publish`: its version becomes the one that is kept, and is sent from there.

    With encoding delta, the holders of the version that was kept before get what changed. Replicas that share a node's
    files get the pieces once, as far as it is known who takes them. A receiver that refuses what
    it got gets the full set, once.
    """

    def __init__(self, member: Member, request: wire.Publish, kept: Kept) -> None:
        self._member, self._request, self._kept = member, request, kept
        self._loop = asyncio.get_running_loop()
        self._party = Party(member, request.receivers, gives_way=request.gives_way, least=request.quorum)
        self._sends = True
        self._cuts: asyncio.Queue[Cut | None] = asyncio.Queue()  # None: all are taken
        self._applied, self._failed, self._repaired = dict[str, float](), dict[str, str](), dict[str, str]()
        self._start = time.monotonic()
        self._delta_bytes = self._words = self._changed = 0
        self._changes: list[tuple[wire.WeightsTensor, bytes]] = []  # of all pieces, while there is room to keep them
        self._room = -1.0
        self._base, self._digest = (kept.version, kept.digest), kept.digest
        self._holders = kept.holders() & {*request.receivers} if request.encoding == "delta" else frozenset[str]()
        self._followers = kept.followers(request.receivers)
        known = request.encoding == "delta" and kept.version is not None
        self._finds_changes = known and bool(self._holders or kept.behind)

    @contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Leave receivers out whose link is out, or goes out, or that take too long, as long as the quorum is left."""
        watching = self._loop.create_task(self._lose_patience())
        try:
            with self._member.links.told(self._look):
                self._look()
                yield
        finally:
            watching.cancel()

    async def _lose_patience(self) -> None:
        """Leave out, from when too much time has passed, whoever the others wait for."""
        if (patience := self._request.patience_seconds) is None:
            return
        await asyncio.sleep(patience)
        cause = f"it took longer than {patience:g} s for a version, and others did not"
        while True:
            slow = [one for one in self._party.present if self._is_slow(one)]
            others = [one for one in self._party.present if one not in slow and one not in self._failed]
            if len(others) >= max(self._request.quorum or 0, 1):
                self._leave_out(dict.fromkeys(slow, cause))
            await asyncio.sleep(min(patience, _LOOK_SECONDS))

    def _is_slow(self, receiver: str) -> bool:
        """Whether a receiver holds up what is sent, or, behind the last piece, its own word on the version."""
        if self._sends:
            return self._party.open_bytes(receiver) > WINDOW_BYTES / 2
        return receiver not in self._applied and receiver not in self._failed

    def _look(self, _: str | None = None) -> None:
        """Leave those out that may be."""
        if (quorum := self._request.quorum) is None:
            return
        out = {one: cause for one, cause in self._party.unreachable().items() if one not in self._applied}
        if len(self._party.present) - len(out) >= quorum:
            self._leave_out(out)

    def _leave_out(self, causes: Mapping[str, str]) -> None:
        self._party.leave_out(causes)
        self._kept.behind |= {*causes}

    def take(self, tensors: Iterable[tuple[str, torch.Tensor | NDArray[Any]]]) -> None:
        """Make these weights the version that is kept; called in the engine's thread, which waits for no link."""
        self._room = DELTAS_SHARE * self._kept.bytes if self._finds_changes else -1.0
        self._kept.begin()
        under_way: deque[Future[Cut]] = deque()
        count = threads()
        with ThreadPoolExecutor(count, thread_name_prefix="weights") as pool:
            for name, tensor in tensors:
                for work in self._works(name, tensor):
                    under_way.append(pool.submit(self._cut, *work))
                    if len(under_way) > PIECES_PER_THREAD * count:
                        self._give(under_way.popleft().result())
            while under_way:
                self._give(under_way.popleft().result())
        version, pieces = self._request.version, self._kept.pieces
        self._digest = version_digest({place: message.digest for place, message in pieces.items()})
        base, base_digest = self._base
        if base is not None and self._room >= 0:
            self._kept.remember(Delta(base, base_digest, version, self._digest, self._changes))
        self._kept.digest, self._kept.version = self._digest, version
        self._loop.call_soon_threadsafe(self._cuts.put_nowait, None)

    def take_kept(self) -> None:
        """Send the version as it is kept; nobody has a base of it."""
        self._holders = frozenset()
        for message in self._kept.pieces.values():
            self._cuts.put_nowait(Cut(message))
        self._cuts.put_nowait(None)

    async def send(self) -> None:
        """Announce the version and send every piece as soon as it is taken."""
        version = self._request.version
        await self._party.send(self._of(holders=False), wire.WeightsBegin(version=version))
        base, base_digest = self._base
        delta = wire.WeightsBegin(version=version, encoding="delta", base_version=base, base_digest=base_digest)
        await self._party.send(self._of(holders=True), delta)
        while (cut := await self._cuts.get()) is not None:
            await self._send_piece(cut)
        self._sends = False

    async def finish(self) -> wire.Published:
        """Close the version and wait for every receiver.

        One that fails, refuses the full set or computed another digest is among the `failed`; raises HetrlError when a
        quorum is wanted and nobody applied it.
        """
        receivers = tuple(self._party.present)
        await asyncio.gather(*(self._close(receiver) for receiver in receivers))
        told = [one for one in receivers if one not in self._party.left_out]
        applied = {one: self._applied[one] for one in told if one in self._applied}
        failed = {one: self._failed[one] for one in told if one in self._failed}
        self._note(applied)
        if failed and not applied and self._request.quorum != 0:
            raise HetrlError("; ".join(failed.values()))
        return wire.Published(
            version=self._request.version,
            digest=self._digest,
            bytes=self._kept.bytes,
            seconds=time.monotonic() - self._start,
            apply_seconds=applied,
            failed=failed,
            left_out=self._party.left_out,
            delta_bytes=self._delta_bytes if self._holders else None,
            changed=self._changed / self._words if self._holders and self._words else None,
            repaired=self._repaired,
        )

    def _note(self, applied: Iterable[str]) -> None:
        """Note who has the version, and forget what changed before where nobody is behind."""
        for receiver in self._failed:
            if receiver not in self._party.left_out:  # else what it was asked failed with that, and it has what it had
                self._kept.proven.pop(receiver, None)
        for receiver in applied:
            self._kept.proven[receiver] = self._request.version
        self._kept.behind |= {*self._party.left_out}
        self._kept.settle()

    def _of(self, *, holders: bool) -> list[str]:
        """Return the receivers that have, or have not, the base of the delta."""
        return [one for one in self._party.present if (one in self._holders) == holders]

    def _taking(self, receivers: Iterable[str]) -> list[str]:
        """Return those of some receivers that take pieces, for themselves and for others of their node."""
        return [one for one in receivers if one not in self._followers]

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

    def _cut(self, spec: wire.TensorSpec, offset: int, whole: memoryview, known: bool) -> Cut:
        """Take the digest of a piece and find what changed in it; what is kept of it becomes the piece."""
        message = piece_of(self._request.version, spec, offset, whole)
        held, size = self._kept.tensors[spec.name][offset : offset + whole.nbytes], word_bytes(spec)
        place = spec.name, offset
        if not (self._finds_changes and known and size):
            self._kept.replace(place, held, whole)
            return Cut(message)
        after = numpy.frombuffer(whole, numpy.uint8)
        payload = changes.encode(words(held, spec), words(after, spec))
        self._kept.replace(place, held, after)
        count, changed = whole.nbytes // size, changes.changed_words(payload)
        return Cut(message, payload if len(payload) < whole.nbytes else None, count, changed)

    def _give(self, cut: Cut) -> None:
        self._kept.pieces[cut.message.tensor.name, cut.message.offset] = cut.message
        if self._room >= 0:
            data = self._kept.whole(cut.message).tobytes() if cut.changes is None else cut.changes
            self._changes.append((structs.replace(cut.message, changes=cut.changes is not None), data))
            self._room -= len(data)
        self._loop.call_soon_threadsafe(self._cuts.put_nowait, cut)

    async def _send_piece(self, cut: Cut) -> None:
        self._words, self._changed = self._words + cut.words, self._changed + cut.changed
        whole = self._kept.whole(cut.message)
        if cut.changes is None:
            self._delta_bytes += whole.nbytes
            await self._party.send(self._taking(self._party.present), cut.message, [whole])
            return
        self._delta_bytes += len(cut.changes)
        changed = structs.replace(cut.message, changes=True)
        await self._party.send(self._taking(self._of(holders=True)), changed, [cut.changes])
        await self._party.send(self._taking(self._of(holders=False)), cut.message, [whole])

    async def _close(self, receiver: str) -> None:
        """Wait for the word of a receiver; one that refuses what it got gets the full set."""
        cause = await self._word_of(receiver)
        if cause is not None and receiver in self._party.present:
            self._repaired[receiver] = cause
            cause = await self._word_of(receiver, again=True)
        if cause is not None:
            self._failed[receiver] = f"{receiver}: {cause}"

    async def _repeat(self, receiver: str) -> None:
        """Send the full set, as it is kept."""
        await self._party.send([receiver], wire.WeightsBegin(version=self._request.version))
        for message in self._kept.pieces.values():
            await self._party.send([receiver], message, [self._kept.whole(message)])

    async def _word_of(self, receiver: str, *, again: bool = False) -> str | None:
        """Ask a receiver, sending the full set before where it is to come `again`, for its word on the version.

        Returns why it refused it. That it applied it, or failed, is noted.
        """
        version, pieces = self._request.version, self._kept.pieces.values()
        try:
            if again:
                await self._repeat(receiver)
            if receiver in self._party.present:  # else it was left out meanwhile
                applied = await self._party.word_of(receiver, version, self._digest, pieces)
                self._applied[receiver], self._kept.words[receiver] = applied.seconds, applied
        except RunAborted:
            raise
        except RefusedError as refusal:
            return str(refusal)
        except HetrlError as error:
            self._failed[receiver] = str(error)
        return None


def _bytes_of(tensor: torch.Tensor | NDArray[Any]) -> memoryview:
    """Return the bytes of a tensor in the order of its elements; not a copy where it is contiguous."""
    if isinstance(tensor, numpy.ndarray):
        return numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8).data
    import torch

    data: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return data
