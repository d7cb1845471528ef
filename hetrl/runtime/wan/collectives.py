"""Operations of a group on several sites, each tensor once over each link.

send, recv    from rank to rank
broadcast     the root sends to the leaders of the other sites; every site passes each piece on inside as it arrives
all_gather    the same from every rank, at once
all_reduce    `hetrl.runtime.wan.all_reduce`
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy
import torch

from hetrl.runtime.wan.communicator import Communicator, Operation
from hetrl.runtime.wan.streams import Arrivals, Key, cuts


class Way(Protocol):
    """How a rank's flat tensor gets to the leaders of other sites."""

    async def send(self, group: Communicator, key: Key, to: Sequence[str], tensor: torch.Tensor) -> None:
        """Send it."""

    def begin(self, group: Communicator, key: Key, source: int, tensor: torch.Tensor) -> Arrivals:
        """Begin to receive it, in the pieces that `cuts` makes of it."""


class _AsItIs:
    """All values, each piece copied, so that the tensor may change afterwards."""

    async def send(self, group: Communicator, key: Key, to: Sequence[str], tensor: torch.Tensor) -> None:
        """Send a flat tensor to some ranks."""
        place = view_of(tensor)
        for number, cut in enumerate(cuts(place.nbytes)):
            await group.endpoint.send(to, key, number, (place.nbytes, dtype_name(tensor)), bytes(place[cut]))
        group.endpoint.outbox.end(to, key)

    def begin(self, group: Communicator, key: Key, source: int, tensor: torch.Tensor) -> Arrivals:
        """Begin to receive a flat tensor from one rank."""
        return group.receive(key, source, view_of(tensor), dtype_name(tensor), cuts(tensor.nbytes))


AS_IT_IS: Way = _AsItIs()


async def send(group: Communicator, key: Key, to: Sequence[str], tensor: torch.Tensor) -> None:
    """Send a flat tensor to some ranks."""
    await AS_IT_IS.send(group, key, to, tensor)


async def receive(group: Communicator, key: Key, source: int, tensor: torch.Tensor) -> None:
    """Receive a flat tensor from one rank."""
    arrivals = AS_IT_IS.begin(group, key, source, tensor)
    await arrivals.all()
    group.endpoint.inbox.end(arrivals)


async def spread(
    group: Communicator, operation: Operation, blocks: Sequence[tuple[int, torch.Tensor]], way: Way = AS_IT_IS
) -> None:
    """Give every rank each block (root, flat tensor) of its root: broadcast is one block, all_gather one per rank."""
    placement = group.placement
    passed: list[asyncio.Future[None]] = []
    async with asyncio.TaskGroup() as tasks:
        for tag, (root, tensor) in enumerate(blocks):
            if root == placement.rank:
                key = replace(operation.key, tag=tag)
                tasks.create_task(way.send(group, key, placement.other_leaders, tensor))
        for (root, tensor), arrivals in zip(blocks, _foreign(group, operation, blocks, way), strict=True):
            passed += await _pass_on(group, root, tensor, arrivals)
        await asyncio.gather(*passed)


def _foreign(
    group: Communicator, operation: Operation, blocks: Sequence[tuple[int, torch.Tensor]], way: Way
) -> list[Arrivals | None]:
    """Begin to receive the blocks of other sites, if this rank leads its own; None for the others."""
    placement = group.placement
    return [
        way.begin(group, replace(operation.key, tag=tag), root, tensor)
        if placement.leads and root not in placement.local
        else None
        for tag, (root, tensor) in enumerate(blocks)
    ]


async def _pass_on(
    group: Communicator, root: int, tensor: torch.Tensor, arrivals: Arrivals | None
) -> list[asyncio.Future[None]]:
    """Give a block to every rank of this island, piece by piece as it arrives."""
    local, view = group.placement.local, tensor.view(torch.uint8)
    origin = local.index(root) if root in local else 0
    passed = []
    for number, cut in enumerate(cuts(view.numel())):
        if arrivals is not None:
            await arrivals.piece(number)
        if group.island is not None:
            passed.append(group.island.broadcast(view[cut], origin))
    if arrivals is not None:
        group.endpoint.inbox.end(arrivals)
    return passed


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's element type, as in "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def view_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a flat CPU tensor, which share its memory and keep it.

    `tensor.numpy()` would do it and fix the size of the tensor's storage for good: a model that leaves its device
    (`hetrl.runtime.megatron.offload`) could not free it any more.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    held = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    held.tensor = tensor  # type: ignore[attr-defined]
    # The format of a memoryview of ctypes is another one, that takes no other bytes.
    return memoryview(numpy.frombuffer(held, dtype=numpy.uint8))  # type: ignore[call-overload]
