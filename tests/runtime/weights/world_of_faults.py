"""A trainer and two replicas, the gateways and the link between: any of them is killed at a chosen moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetrl.runtime import wire
from hetrl.runtime.transport.chunks import Buffer
from hetrl.runtime.transport.member import Envelope
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.latecomers import Latecomers
from hetrl.runtime.weights.publisher import Publisher
from tests.engines.transport.transport_runs import BETA, BETA_1, TRAINER, Cable, Run, cabled, until
from tests.runtime.weights.mortal_replica import PIECES, Replica, kill, name_of

OUT_SECONDS = 0.15  # a link that is cut

PHASES = {  # of a version, and who is in it
    "trainer": ("sends begin", *(f"sends {piece}" for piece in PIECES), "sends end"),
    "replica": ("begins", *(f"takes {piece}" for piece in PIECES), "verifies", "loads", "answers"),
}
PARTS = ("trainer", "agent", "server", "gateway alpha", "gateway beta", "link snaps", "link is silent")


@dataclass
class Fault:
    """What is killed, in which phase; of replicas, in that of one of them."""

    part: str
    phase: str
    replica: str
    delay_seconds: float
    done: bool = False


class World:
    """The trainer at alpha, two replicas at beta, and what is to be killed next."""

    def __init__(self, run: Run, cables: Sequence[Cable], folder: Path) -> None:
        self.run, self._cables = run, cables
        self.replicas = {address: Replica(self, address, folder / address[-1]) for address in (BETA, BETA_1)}
        self.loads: list[tuple[int, dict[str, torch.Tensor]]] = []
        self.pieces = 0  # of the version that is published
        self.fault: Fault | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._publishing: asyncio.Task[wire.Published] | None = None

    async def start(self) -> None:
        await self._start_trainer()
        for replica in self.replicas.values():
            await replica.start()

    async def stop(self) -> None:
        await self.at_rest()
        for replica in self.replicas.values():
            await replica.kill()
        await kill(self.trainer)

    def beside(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._beside.add(task)
        return task

    async def at_rest(self) -> None:
        """Wait until all that was killed is there again; raises what went wrong with that."""
        while self._beside:
            await self._beside.pop()
        await until(lambda: self.run.is_up("alpha", "beta") and self.run.is_up("beta", "alpha"))

    async def publish(self, version: int, tensors: dict[str, torch.Tensor], to: Sequence[str]) -> wire.Published | None:
        """Publish a version; None where the trainer is killed meanwhile."""
        request = wire.Publish(version=version, receivers=tuple(to), quorum=0, encoding="delta")
        publisher = Publisher(self.trainer, request, self.kept)

        async def run() -> wire.Published:
            await asyncio.to_thread(publisher.take, tensors.items())
            self.pieces = len(self.kept.pieces)
            await publisher.send()
            return await publisher.finish()

        self._publishing = asyncio.create_task(run())
        with suppress(asyncio.CancelledError):
            return await self._publishing
        return None

    async def catch_up(self, version: int, to: Sequence[str]) -> wire.Published:
        """Bring replicas to a version that is published, or a later one."""
        return await Latecomers(self.trainer, wire.CatchUp(version=version, receivers=tuple(to)), self.kept).bring()

    async def moment(self, phase: str, replica: str) -> None:
        """A phase begins, of the trainer's work for a replica or of that replica's own: break what is to be broken."""
        fault = self.fault
        if fault is None or fault.done or (phase, replica) != (fault.phase, fault.replica):
            return
        fault.done = True
        breaking = self.beside(self._break(fault))
        killed = ("trainer",) if phase in PHASES["trainer"] else ("agent", "server")
        if fault.part in killed:  # who is killed gets no further
            await asyncio.shield(breaking)

    async def _break(self, fault: Fault) -> None:
        await asyncio.sleep(fault.delay_seconds)
        match fault.part.split():
            case ["trainer"]:
                assert self._publishing is not None
                self._publishing.cancel()
                await kill(self.trainer)
                await self._start_trainer()
            case ["agent"]:
                await self.replicas[fault.replica].restart()
            case ["server"]:
                self.replicas[fault.replica].server.kill()
            case ["gateway", site]:
                await self.run.stop(site)
                self.run.start(site)
            case ["link", *how]:
                for cable in self._cables:
                    cable.cut()
                    if how == ["snaps"]:
                        cable.snap()
                await asyncio.sleep(OUT_SECONDS)
                for cable in self._cables:
                    cable.mend()

    async def _start_trainer(self) -> None:
        self.kept = Kept()
        self.trainer = await self.run.member(TRAINER).__aenter__()
        send, request = self.trainer.send, self.trainer.request

        async def sending(to: Sequence[str], message: wire.Message, buffers: Sequence[Buffer] = ()) -> int:
            for replica in to:
                match message:
                    case wire.WeightsBegin():
                        self._sent = dict.fromkeys(self.replicas, 0) if replica == to[0] else self._sent
                        await self.moment("sends begin", replica)
                    case wire.WeightsTensor():
                        await self._sending_piece(replica)
            return await send(to, message, buffers)

        async def asking(to: str, message: wire.Message, **how: Any) -> Envelope:
            if isinstance(message, wire.WeightsEnd):
                await self.moment("sends end", to)
            return await request(to, message, **how)

        self.trainer.send, self.trainer.request = sending, asking  # type: ignore[assignment]

    async def _sending_piece(self, replica: str) -> None:
        self._sent[replica] += 1
        if piece := name_of(self._sent[replica], self.pieces):
            await self.moment(f"sends {piece}", replica)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Start all; both ways between the sites go over cables that can be cut."""
    async with cabled() as (run, there, back):
        made = World(run, (there, back), folder)
        await made.start()
        try:
            yield made
        finally:
            await made.stop()


def faults(part: str, rounds: int, seed: int) -> list[Fault]:
    """Return faults of a part in every phase, some rounds of them, in a random order."""
    chance = random.Random(seed)
    phases = [phase for owner in PHASES.values() for phase in owner]
    found = [
        Fault(part, phase, chance.choice((BETA, BETA_1)), chance.choice((0.0, 0.001, 0.01)))
        for phase in phases * rounds
    ]
    chance.shuffle(found)
    return found
