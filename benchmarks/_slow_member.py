"""A member of the benchmark `slow`: the lead of a run, its controller and its trainer, or a replica.

The lead does what it is told by lines of JSON on stdin: [number of versions, seconds between them, whether all weights
become others first], answered by a row for each version, or [replica that was started again], answered by null; so does
a replica once it has joined.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from _sync_member import serve_replica

from hetrl.dispatch import Capacity, Dispatch
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.emulated.weights import Weights
from hetrl.runtime.rl.draws import Draws
from hetrl.runtime.rl.learner import Versions
from hetrl.runtime.rl.serving import Serving
from hetrl.runtime.rl.tasks import Trainer
from hetrl.runtime.rl.timeline import Timeline
from hetrl.runtime.run.context import answer_requests
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights.publications import Publications
from hetrl.runtime.weights.publisher import Publisher
from hetrl.runtime.wire.keys import read_keys

MODEL_BYTES, TENSORS = 64 * 10**6, 4
CONTROLLER, TRAINER = "alpha/controller/0", "alpha/actor_training/0"


@dataclass(frozen=True)
class Row:
    """A version: when the lead was done with it, how long it took, and who has the newest one then."""

    at_seconds: float
    version: int
    seconds: float
    in_step: Sequence[str]


class Model:
    """The weights that are trained."""

    def __init__(self) -> None:
        self._seed = 0
        self.others()

    def others(self) -> None:
        """Let all be others."""
        self._seed += 1
        self.weights = Weights(TENSORS, MODEL_BYTES, self._seed)

    async def export(self, publisher: Publisher) -> None:
        """Let the publisher have them."""
        await asyncio.to_thread(publisher.take, self.weights.tensors())


async def serve_trainer(member: Member, model: Model) -> None:
    """Publish what the controller asks for."""
    publications = Publications(member)

    async def answer(envelope: Envelope) -> None:
        match envelope.message:
            case wire.Publish():
                await member.reply(envelope, await publications.begin(envelope.message, model.export))
            case wire.FinishPublish():
                publications.finish(envelope, envelope.message)
            case wire.CatchUp():
                publications.catch_up(envelope, envelope.message)

    try:
        await answer_requests(member, answer)
    finally:
        await publications.close()


class Notes:
    """Tells stderr who is behind."""

    def published(self, _: wire.Published) -> None:
        """Say nothing."""

    def replicas_behind(self, version: int, causes: Mapping[str, str]) -> None:
        """Say who missed a version."""
        print(f"behind since version {version}: {dict(causes)}", file=sys.stderr, flush=True)

    def replicas_caught_up(self, published: wire.Published) -> None:
        """Say who is there again."""
        print(f"{[*published.apply_seconds]} at version {published.version}", file=sys.stderr, flush=True)


def lost(name: str, error: HetrlError) -> None:
    """End the benchmark: nobody should be."""
    raise SystemExit(f"{name} is lost: {error}")


async def lead(controller: Member, model: Model, replicas: Sequence[str]) -> None:
    """Do what stdin says until it ends."""
    dispatch = Dispatch({name: Capacity(1, 1) for name in replicas}, 8, 8)
    draws, versions = Draws(controller, dispatch, lost, Timeline()), Versions()
    actor = Trainer(controller, "actor_training", TRAINER, tuple(replicas), "delta")
    served = Serving(actor, draws, versions, Notes(), 0.0)
    catching_up = asyncio.create_task(served.catch_up())
    start = time.monotonic()
    with controller.links.told(draws.link_changed):
        while line := await asyncio.to_thread(sys.stdin.readline):
            match json.loads(line):
                case [str(replica)]:
                    served.back(replica)
                    said: object = None
                case [count, every_seconds, others]:
                    rows = []
                    for number in range(count):
                        await asyncio.to_thread(model.others if others and number == 0 else model.weights.change)
                        began = time.monotonic()
                        await served.publish()
                        now = time.monotonic()
                        rows.append(asdict(Row(now - start, versions.actor, now - began, draws.in_step)))
                        await asyncio.sleep(max(0.0, began + every_seconds - now))
                    said = rows
            print(json.dumps(said), flush=True)
    catching_up.cancel()


async def main() -> None:
    """Be the replica argv[2] of the gateway argv[1], or, with several, the lead that serves them."""
    gateway, *replicas = sys.argv[1:]
    async with AsyncExitStack() as stack:

        async def join(address: str) -> Member:
            keys = read_keys(Path("keys.json"))
            return await stack.enter_async_context(Member(address, "run", gateway, keys, Path()))

        if len(replicas) == 1:
            member = await join(replicas[0])
            print("null", flush=True)
            await serve_replica(member)
            return
        model = Model()
        trainer = asyncio.create_task(serve_trainer(await join(TRAINER), model))
        await lead(await join(CONTROLLER), model, replicas)
        trainer.cancel()


if __name__ == "__main__":
    asyncio.run(main())
