"""A member of the benchmark `sync`: a trainer that publishes weights, or a replica that takes them.

The trainer publishes for each line of JSON on stdin, [bytes or a safetensors file, number of receivers, delta], random
weights of so many bytes or those of the file, whole or as what changed since the one before, and answers with what it
published. The replica does all that the agent of a rollout server does, but has no server to load the weights.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from hetrl.runtime import wire
from hetrl.runtime.run.rollout import Agent
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.intake import Intake
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.publisher import Publisher
from hetrl.runtime.weights.weight_file import WeightFile
from hetrl.runtime.wire.keys import read_keys

TENSOR_BYTES = 16 * 10**6
MOST_BYTES = 2 * 10**9  # of a set


class NoServer:
    """Takes a weight file and does nothing with it."""

    async def update_weights(self, *_: Any, **__: Any) -> None:
        """Load nothing."""


class NeverIdle:
    """Holds its devices all the time."""

    asleep = False


async def serve_replica(member: Member) -> None:
    """Take weights for as long as stdin is open."""
    with tempfile.TemporaryDirectory() as directory:
        weights = Intake(WeightFile(Path(directory) / "weights", MOST_BYTES))
        await Agent(member, NoServer(), NeverIdle(), weights, recompute=False, goes_with_it=False).serve()  # type: ignore[arg-type]


async def serve_trainer(member: Member, receivers: Sequence[str]) -> None:
    """Publish what each line names, to the first of the receivers, until stdin ends."""
    version, kept = 0, Kept()
    while line := await asyncio.to_thread(sys.stdin.readline):
        version += 1
        source, taking, delta = json.loads(line)
        tensors = load_file(source) if isinstance(source, str) else random_weights(source, version)
        encoding = "delta" if delta else "full"
        request = wire.Publish(version=version, receivers=tuple(receivers[:taking]), encoding=encoding)
        publisher = Publisher(member, request, kept)
        await asyncio.gather(publisher.send(), asyncio.to_thread(publisher.take, tensors.items()))
        print(json.dumps(msgspec.to_builtins(await publisher.finish())), flush=True)


def random_weights(size_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of so many bytes in all."""
    generator = torch.Generator().manual_seed(seed)
    count = size_bytes // TENSOR_BYTES
    return {f"weight.{i}": torch.randn(TENSOR_BYTES // 2, generator=generator).bfloat16() for i in range(count)}


async def main() -> None:
    """Join as the address in argv[1] of the gateway in argv[2]; those after it are the receivers of a trainer."""
    address, gateway, *receivers = sys.argv[1:]
    async with Member(address, "run", gateway, read_keys(Path("keys.json")), Path()) as member:
        await (serve_trainer(member, receivers) if receivers else serve_replica(member))


if __name__ == "__main__":
    asyncio.run(main())
