"""Receivers of weights that take what a publisher sends into files, with a wire between that may do damage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights.intake import Intake
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.node_share import NodeShare
from hetrl.runtime.weights.publisher import Publisher
from hetrl.runtime.weights.weight_file import WeightFile

MOST = 10**7  # bytes of a version
run = asyncio.Runner().run  # one loop for all versions, as an agent has: a version may begin while one is still written
Sent = tuple[wire.Message, list[bytes]]
Damage = Callable[[str, Sent], Sequence[Sent]]  # what arrives at a receiver in the place of a message


class Receiver:
    """Takes versions as an agent does; `served` are name and tensors of what it loads, each time."""

    def __init__(self, directory: Path, share: NodeShare | None = None) -> None:
        self.directory, self.share = directory, share
        self.served: dict[int, dict[str, torch.Tensor]] = {}
        self.newest = 0
        self.start()

    def start(self) -> None:
        """Begin a life, with what lies on the disk."""
        self.file = WeightFile(self.directory, MOST)
        self.intake = Intake(self.file, self.share)

    async def take(self, message: wire.Message, buffers: Sequence[bytes]) -> wire.Message | None:
        try:
            match message:
                case wire.WeightsBegin():
                    await self.intake.begin(message)
                case wire.WeightsTensor():
                    await self.intake.add(message, buffers[0])
                case wire.WeightsEnd(version=version):
                    path, digest = await self.intake.end(message)
                    self.served[version], self.newest = load_file(path), version
                    shared = {"node": self.intake.node, "follows": self.intake.follows}
                    return wire.WeightsApplied(version=version, digest=digest, seconds=0.0, **shared)
        except HetrlError as error:
            if isinstance(message, wire.WeightsEnd):
                return wire.WeightsRejected(version=message.version, cause=str(error))
        return None


class Wire:
    """In the place of the trainer's member: brings every message to its receivers, damaged or not."""

    def __init__(self, receivers: dict[str, Receiver]) -> None:
        self.receivers, self.links = receivers, Links()
        self.damage: Damage = lambda _, sent: [sent]
        self.sent: list[tuple[str, Sent]] = []

    async def send(self, to: Sequence[str], message: wire.Message, buffers: Sequence[Any] = ()) -> None:
        for name in to:
            await self._bring(name, (message, [bytes(buffer) for buffer in buffers]))

    async def request(self, to: str, message: wire.Message, **_: Any) -> Envelope:
        answer = await self._bring(to, (message, []))
        if answer is None:
            raise HetrlError(f"{to} did not answer")
        return Envelope(cast(Any, None), answer, ())

    async def _bring(self, to: str, sent: Sent) -> wire.Message | None:
        self.sent.append((to, sent))
        answer = None
        for message, buffers in self.damage(to, sent):
            answer = await self.receivers[to].take(message, buffers)
        return answer


def publish(
    wire_: Wire,
    version: int,
    tensors: dict[str, torch.Tensor],
    kept: Kept | None,
    to: Sequence[str] | None = None,
) -> wire.Published:
    """Publish these tensors as a trainer does, to all receivers or to some."""
    receivers = tuple(wire_.receivers if to is None else to)
    request = wire.Publish(version=version, receivers=receivers, quorum=1, encoding="delta" if kept else "full")
    return run(published(wire_, request, tensors, kept or Kept()))


async def published(wire_: Wire, request: wire.Publish, tensors: dict[str, torch.Tensor], kept: Kept) -> wire.Published:
    """Do what a trainer is asked for; a version that is kept is sent as it is kept."""
    publisher = Publisher(cast(Member, wire_), request, kept)
    if kept.version == request.version:
        publisher.take_kept()
    else:
        await asyncio.to_thread(publisher.take, tensors.items())
    await publisher.send()
    return await publisher.finish()


def same(served: dict[str, torch.Tensor], published: dict[str, torch.Tensor]) -> bool:
    """Whether every bit is what it was."""

    def bits(tensor: torch.Tensor) -> bytes:
        return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    return served.keys() == published.keys() and all(bits(served[name]) == bits(published[name]) for name in served)


def model(seed: int, words: int = 5000) -> dict[str, torch.Tensor]:
    """Weights of several dtypes and shapes, a tensor of more than one piece (of PIECE_BYTES) among them where asked."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(words // 10, 10, generator=generator).bfloat16(),
        "norm": torch.randn(7, generator=generator),
        "mask": torch.arange(6, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
    }


def stepped(tensors: dict[str, torch.Tensor], seed: int, share: float = 0.01) -> dict[str, torch.Tensor]:
    """The same weights after a step that changed about this share of them."""
    generator = torch.Generator().manual_seed(seed)

    def step(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        moved = torch.rand(tensor.shape, generator=generator) < share
        return torch.where(moved, tensor * 1.01, tensor)

    return {name: step(tensor) for name, tensor in tensors.items()}
