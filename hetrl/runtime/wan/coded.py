"""Pieces that cross in another form than they have in the result: shorter ones become values where they arrive.

A piece of full length is its values. So every sender may fall back to these, piece by piece. Coding and decoding run in
threads, several pieces at once: what they call lets go of Python's lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import numpy as np
import torch

from hetrl.runtime.wan.collectives import dtype_name, view_of
from hetrl.runtime.wan.communicator import Communicator
from hetrl.runtime.wan.streams import Arrivals, Key
from hetrl.runtime.wire import planes

_AHEAD = 4  # pieces
_LEAST_BYTES = 64 * 1024  # below, the trip counts and not the bytes


class CodedArrivals(Arrivals):
    """A stream whose pieces may be shorter than what they become."""

    def __init__(self, key: Key, source: str, place: memoryview, cuts: Sequence[slice], dtype: str) -> None:
        super().__init__(key, source, place, cuts, dtype)
        self._decoding: dict[int, asyncio.Future[None]] = {}

    async def piece(self, number: int) -> None:
        """Wait until the piece has landed and is values; raises HetrlError when it cannot be."""
        await super().piece(number)
        decoding = self._decoding.pop(number, None)
        if decoding is not None:
            await decoding

    def _decode(self, payload: memoryview, place: memoryview) -> None:
        raise NotImplementedError

    def _fits(self, number: int, size_bytes: int) -> bool:
        return size_bytes <= self._place[self._cuts[number]].nbytes

    def _put(self, number: int, buffer: memoryview) -> None:
        if super()._fits(number, buffer.nbytes):
            super()._put(number, buffer)
        else:
            place = self._place[self._cuts[number]]
            self._decoding[number] = asyncio.get_running_loop().run_in_executor(None, self._decode, buffer, place)


class _PackedSums(CodedArrivals):
    """Sums in bf16 (`hetrl.runtime.wire.planes`)."""

    def _decode(self, payload: memoryview, place: memoryview) -> None:
        planes.unpack(payload, np.frombuffer(place, np.uint16))


async def in_threads(calls: Iterable[Callable[[], bytes]]) -> AsyncIterator[bytes]:
    """Yield what calls return, in their order, a few of them running ahead."""
    loop, running = asyncio.get_running_loop(), deque[asyncio.Future[bytes]]()
    for call in calls:
        running.append(loop.run_in_executor(None, call))
        if len(running) > _AHEAD:
            yield await running.popleft()
    while running:
        yield await running.popleft()


async def send_sums(
    group: Communicator, to: Sequence[str], key: Key, number: int, size_bytes: int, segment: torch.Tensor
) -> None:
    """Send a segment of `size_bytes` in all, which nobody changes any more: bf16 packed where that is less."""
    piece: bytes | memoryview = view_of(segment)
    if segment.dtype == torch.bfloat16 and segment.nbytes >= _LEAST_BYTES:
        packed = await asyncio.to_thread(planes.pack, np.frombuffer(piece, np.uint16))
        piece = min(piece, packed, key=len)
    await group.endpoint.send(to, key, number, (size_bytes, dtype_name(segment)), piece)


def receive_sums(group: Communicator, key: Key, source: int, tensor: torch.Tensor, pieces: Sequence[slice]) -> Arrivals:
    """Begin to receive what a leader sends with `send_sums`."""
    kind = _PackedSums if tensor.dtype == torch.bfloat16 else Arrivals
    return group.begin(kind(key, group.addresses[source], view_of(tensor), pieces, dtype_name(tensor)))
