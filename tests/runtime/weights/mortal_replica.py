"""A replica whose agent and server can be killed, and which says which phase of a version it is in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import load_file

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.run.rollout import Agent, Rest, Server
from hetrl.runtime.transport.chunks import Buffer
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights.intake import Intake
from hetrl.runtime.weights.weight_file import WeightFile
from tests.engines.transport.transport_runs import Run
from tests.runtime.weights.receivers import MOST

PIECES = ("first piece", "middle piece", "last piece")


def name_of(number: int, pieces: int) -> str | None:
    """Return the name of a piece, the first one being number 1, where it has one."""
    return {1: PIECES[0], pieces // 2: PIECES[1], pieces: PIECES[2]}.get(number)


async def kill(member: Member) -> None:
    """End a member as SIGKILL does: nothing is said, nothing is waited for."""
    for task in member._tasks:
        task.cancel()
    await asyncio.gather(*member._tasks, return_exceptions=True)
    await asyncio.to_thread(member._connection.close().term)


class Served(Server):
    """Holds what it loaded, as a server that draws samples would."""

    def __init__(self, moment: Callable[[str], Any], loaded: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        self._moment, self._loaded, self._ended = moment, loaded, False

    @property
    def versions(self) -> dict[str, str]:
        return {}

    @property
    def ended(self) -> bool:
        return self._ended

    async def generate(self, *_: Any) -> tuple[wire.Sample, ...]:
        raise NotImplementedError

    async def update_weights(self, version: int, path: Path, timeout_seconds: float, *, recompute: bool) -> None:
        if not self._ended:
            await self._moment("loads")
        if self._ended:
            raise HetrlError("the server is gone")
        self._loaded(version, load_file(path))

    async def load_weights(self, version: int, path: Path, timeout_seconds: float) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        self._ended = True


class Awake:
    """A server that never sleeps."""

    asleep = False


class Watched(Intake):
    """Says which phase of a version it is in."""

    def __init__(
        self, directory: Path, moment: Callable[[str], Any], pieces: Callable[[], int], began: list[str]
    ) -> None:
        super().__init__(WeightFile(directory, MOST))
        self._moment, self._pieces, self._began, self._seen = moment, pieces, began, 0

    async def begin(self, begin: wire.WeightsBegin) -> None:
        self._seen = 0
        self._began.append(begin.encoding)
        await self._moment("begins")
        await super().begin(begin)

    async def add(self, message: wire.WeightsTensor, buffer: Buffer) -> None:
        self._seen += 1
        if piece := name_of(self._seen, self._pieces()):
            await self._moment(f"takes {piece}")
        await super().add(message, buffer)

    async def end(self, end: wire.WeightsEnd) -> tuple[Path, str]:
        await self._moment("verifies")
        return await super().end(end)


class Surroundings(Protocol):
    """What a replica needs of the world that it is in."""

    run: Run
    pieces: int  # of the version that is published
    loads: list[tuple[int, dict[str, torch.Tensor]]]

    async def moment(self, phase: str, replica: str) -> None:
        """Hear that a phase begins."""

    def beside(self, work: Any) -> asyncio.Task[None]:
        """Run something that is waited for before the next version."""


class Replica:
    """An agent and its server, which are started again when they are killed, as Slurm or the launcher does."""

    def __init__(self, world: Surroundings, address: str, directory: Path) -> None:
        self._world, self.address, self._directory = world, address, directory
        self.serves: tuple[int, dict[str, torch.Tensor]] | None = None
        self.lives = 0
        self.began: list[str] = []  # the encodings of the versions that came

    async def start(self) -> None:
        self.lives, self.serves = self.lives + 1, None
        self.member = await self._world.run.member(self.address).__aenter__()
        self.server = Served(self._moment, self._loaded)
        intake = Watched(self._directory, self._moment, lambda: self._world.pieces, self.began)
        idle = cast(Rest, Awake())
        agent = Agent(self._answering(), self.server, idle, intake, recompute=False, goes_with_it=True)
        self._serving = asyncio.create_task(agent.serve())
        self._serving.add_done_callback(self._ended)

    async def kill(self) -> None:
        self._serving.remove_done_callback(self._ended)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await kill(self.member)

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    def _ended(self, _: asyncio.Task[None]) -> None:
        """Start a replica again whose server was killed; any other end is one of the test."""
        self._world.beside(self.restart())

    def _answering(self) -> Member:
        """Return the member, which says when it answers."""
        reply = self.member.reply

        async def answer(envelope: Envelope, message: wire.Message, buffers: Sequence[Buffer] = ()) -> None:
            if isinstance(message, wire.WeightsApplied):
                await self._moment("answers")
            await reply(envelope, message, buffers)

        self.member.reply = answer  # type: ignore[method-assign]
        return self.member

    def _loaded(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        self.serves = (version, tensors)
        self._world.loads.append(self.serves)

    async def _moment(self, phase: str) -> None:
        await self._world.moment(phase, self.address)
