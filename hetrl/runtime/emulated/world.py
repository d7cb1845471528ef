"""An emulated world of a training or an inference: rank 0 answers the run as a real one does.

Score, Train     wait as long as the play of this batch says, while its ranks send what crosses; made-up scores
Save, Restore    what the controller wants to be kept, in a file
Publish          made-up weights, in real pieces with real digests, as slow as the plan's ways, beside the rest
Sleep, Wake      the way over PCIe, where the idle state is offload
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrl.cost.model import CostModel
from hetrl.cost.weight_sync import held_bytes
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.places import CheckpointPlaces
from hetrl.runtime.emulated import checkpoints, play
from hetrl.runtime.emulated.pace import Pace
from hetrl.runtime.emulated.ranks import EmulatedRank
from hetrl.runtime.emulated.server import LOGPROB
from hetrl.runtime.emulated.travels import Travels
from hetrl.runtime.emulated.weights import Weights
from hetrl.runtime.run.context import Context, answer_requests
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights.intake import Intake
from hetrl.runtime.weights.publications import Publications
from hetrl.runtime.weights.publisher import Publisher
from hetrl.runtime.wire.arrays import pack, unpack
from hetrl.runtime.wire.members import World
from hetrl.workload import TRAINED

METRICS = {"loss": 0.0, "grad_norm": 1.0, "value_clip_fraction": 0.0}  # of a step in which nothing is learnt


@dataclass(frozen=True)
class Emulated:
    """What emulated engines of a site share: its view of the run, the cost model, and the versions on their way."""

    context: Context
    model: CostModel
    travels: Travels

    def pace(self, name: str) -> Pace:
        """Return the clock and the draws of one engine."""
        return Pace(self.context.experiment.launch.emulation, name)

    def weight_bytes(self, task: str) -> float:
        """Return how many bytes stand for a version of a training's weights."""
        held = held_bytes(task, self.context.plan.tasks[task], self.model)
        return sum(held.values()) * self.context.experiment.launch.emulation.bytes_share


class EmulatedWorld:
    """Rank 0 of a world, as the member of the run that speaks for it; `rank` is where it meets its other ranks."""

    def __init__(
        self,
        member: Member,
        rank: EmulatedRank,
        world: World,
        shared: Emulated,
        weights: Intake,
        places: CheckpointPlaces,
    ) -> None:
        self._member, self._rank, self._world, self._shared = member, rank, world, shared
        self._incoming, self._places = weights, places
        self._pace = shared.pace(member.address)
        self._version = 0  # of the weights that arrived
        self._trained = False
        self._publications = Publications(member)

    async def serve(self) -> None:
        """Answer requests until the run finishes or is aborted; a request that fails is answered with its cause."""
        try:
            await answer_requests(self._member, self._answer)
        finally:
            await self._publications.close()
        await self._rank.end()

    async def _answer(self, envelope: Envelope) -> None:
        message, start = envelope.message, time.monotonic()
        match message:
            case wire.Score():
                await self._score(envelope, message)
            case wire.Train(step=step):
                await self._train(envelope, message)
                seconds = time.monotonic() - start
                await self._member.reply(envelope, wire.Trained(step=step, metrics=METRICS, seconds=seconds))
            case wire.Publish():
                await self._member.reply(envelope, await self._publish(message))
            case wire.FinishPublish():
                self._publications.finish(envelope, message)
            case wire.CatchUp():
                self._publications.catch_up(envelope, message)
            case wire.WeightsBegin():
                await self._incoming.begin(message)
            case wire.WeightsTensor():
                await self._incoming.add(message, envelope.buffers[0])
            case wire.WeightsEnd():
                await self._take(envelope, message)
            case wire.Sleep() | wire.Wake():
                await self._switch()
                await self._member.reply(envelope, wire.Done())
            case wire.Save() | wire.FinishSave() | wire.Restore():
                await self._member.reply(envelope, *await self._checkpoint(message, envelope.buffers))
            case _:
                raise HetrlError(f"an emulated {self._world.task} cannot do {type(message).__name__}")

    # ---- scores and steps

    async def _score(self, envelope: Envelope, message: wire.Score) -> None:
        began, start = self._pace.now, time.monotonic()
        arrays = unpack(message.arrays, list(envelope.buffers))
        await self._take_time(began, play.scores, self._tokens(arrays))
        specs, buffers = pack({"scores": self._made_up(message.what, arrays)})
        seconds = time.monotonic() - start
        scored = wire.Scored(step=message.step, arrays=specs, seconds=seconds, version=self._version)
        await self._member.reply(envelope, scored, buffers)

    def _made_up(self, what: str, arrays: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return scores [n, s] that mean nothing: log-probs of every token alike, values 0, rewards between 0 and 1."""
        shape, lengths = arrays["tokens"].shape, arrays["lengths"]
        scores = np.zeros(shape, np.float32)
        if what == "rewards":
            scores[np.arange(shape[0]), lengths - 1] = [self._pace.random.random() for _ in range(shape[0])]
        elif what == "logprobs":
            columns = np.arange(shape[1])
            scores[(columns > 0) & (columns < lengths[:, None])] = LOGPROB
        return scores

    async def _train(self, envelope: Envelope, message: wire.Train) -> None:
        began = self._pace.now
        tokens = self._tokens(unpack(message.arrays, list(envelope.buffers)))
        await self._take_time(began, play.optimizer_step, tokens)
        self._trained = True

    def _tokens(self, arrays: dict[str, NDArray[Any]]) -> list[int]:
        """Return the tokens that each sequence of a batch counts as."""
        lengths: list[int] = (arrays["lengths"] * self._shared.context.experiment.launch.emulation.tokens_each).tolist()
        return lengths

    async def _take_time(self, began: float, plays: play.OfBatch, tokens: Sequence[int]) -> None:
        """Wait until what began has taken its time, and what crosses links meanwhile has arrived."""
        # Beside the loop: with hundreds of ranks it takes seconds, in which the others say that they live.
        played = await asyncio.to_thread(plays, self._world.task, self._world.plan, tokens, self._shared.model)
        share = self._shared.context.experiment.launch.emulation.bytes_share
        crossing = self._rank.cross({link: size * share for link, size in played.carried.items()})
        seconds = self._pace.perturbed(played.seconds, played.micro_batches)
        await asyncio.gather(self._pace.until(began + seconds), crossing)

    # ---- weights

    @cached_property
    def _weights(self) -> Weights:
        shared, task = self._shared, self._world.task
        return Weights(self._layers, shared.weight_bytes(task), shared.context.experiment.launch.emulation.seed)

    @property
    def _layers(self) -> int:
        return self._world.plan.replicas[0].stages[-1].layers[1]

    @property
    def _model(self) -> str | None:
        """Return the model that this world trains, as weight routes call it."""
        return next((name for name, (trains, _) in TRAINED.items() if trains == self._world.task), None)

    async def _publish(self, message: wire.Publish) -> wire.Exported:
        async def export(publisher: Publisher) -> None:
            if self._trained:
                self._weights.change()
                self._trained = False
            await asyncio.to_thread(publisher.take, self._weights.tensors())

        async def travel() -> None:
            if (trained := self._model) and set(message.receivers) <= set(self._users(trained)):
                await self._shared.travels.travel(trained, self._pace)

        return await self._publications.begin(message, export, travel)

    def _users(self, trained: str) -> tuple[str, ...]:
        """Return the members that take every version; the reference, which takes one, is not among them."""
        return self._shared.context.addresses(TRAINED[trained][1])

    async def _take(self, envelope: Envelope, end: wire.WeightsEnd) -> None:
        start = time.monotonic()
        try:
            _, digest = await self._incoming.end(end)
        except HetrlError as error:
            await self._member.reply(envelope, wire.WeightsRejected(version=end.version, cause=str(error)))
            return
        await self._load()
        self._version = end.version
        seconds = time.monotonic() - start
        await self._member.reply(envelope, wire.WeightsApplied(version=end.version, digest=digest, seconds=seconds))

    async def _load(self) -> None:
        users = {takes: name for name, (_, takes) in TRAINED.items()}
        if trained := users.get(self._world.task):
            every = play.load_seconds(self._shared.context.plan, trained, self._shared.model)
            await self._pace.until(self._pace.now + self._pace.perturbed(every[self._world.number]))

    # ---- turns and checkpoints

    async def _switch(self) -> None:
        seconds = play.switch_seconds(self._world.task, self._world.plan, self._shared.model)
        await self._pace.until(self._pace.now + self._pace.perturbed(seconds))

    async def _checkpoint(
        self, message: wire.Save | wire.FinishSave | wire.Restore, buffers: Sequence[memoryview]
    ) -> tuple[wire.Saved | wire.Restored, list[bytes]]:
        if isinstance(message, wire.Restore):
            self._publications.forget()
            restored, samples = await asyncio.to_thread(checkpoints.restore, self._places, message.step)
            return restored, [samples]
        if isinstance(message, wire.Save):
            await asyncio.to_thread(checkpoints.save, self._places, message, buffers)
        else:
            await asyncio.to_thread(checkpoints.finish_save, self._places, message)
        directory, whole = str(self._places.written(message.step)), isinstance(message, wire.FinishSave)
        return wire.Saved(step=message.step, directory=directory, seconds=0.0, whole=whole), []
