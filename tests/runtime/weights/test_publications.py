"""A trainer's versions, one after another, beside whatever else it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights.publications import Publications
from hetrl.runtime.weights.publisher import Publisher
from tests.runtime.weights.receivers import Receiver, Wire, model, same, stepped

A, B = "a/actor_generation/0", "b/actor_generation/0"


class Trainer(Wire):
    """A trainer's member whose messages to receivers are held until they are `let` through; notes its replies."""

    def __init__(self, receivers: dict[str, Receiver]) -> None:
        super().__init__(receivers)
        self.let, self.replies = asyncio.Event(), dict[int, wire.Message]()

    async def send(self, to: Sequence[str], message: wire.Message, buffers: Sequence[Any] = ()) -> None:
        await self.let.wait()
        await super().send(to, message, buffers)

    async def reply(self, envelope: Envelope, message: wire.Message) -> None:
        self.replies[envelope.header.id] = message


def asked(number: int) -> Envelope:
    return cast(Envelope, SimpleNamespace(header=SimpleNamespace(id=number)))


def request(version: int, to: Sequence[str] = (A, B), encoding: str = "delta") -> wire.Publish:
    return wire.Publish(version=version, receivers=tuple(to), quorum=1, encoding=encoding)


def of(weights: dict[str, torch.Tensor]) -> Callable[[Publisher], Awaitable[None]]:
    return lambda publisher: asyncio.to_thread(publisher.take, weights.items())


@asynccontextmanager
async def publishing(receivers: dict[str, Receiver]) -> AsyncIterator[tuple[Trainer, Publications]]:
    trainer = Trainer(receivers)
    publications = Publications(cast(Member, trainer))
    try:
        yield trainer, publications
    finally:
        await publications.close()


async def replied(trainer: Trainer, number: int) -> wire.Message:
    async with asyncio.timeout(20):
        while number not in trainer.replies:
            await asyncio.sleep(0.005)
    return trainer.replies[number]


async def outcome(trainer: Trainer, publications: Publications, version: int) -> wire.Message:
    publications.finish(asked(version), wire.FinishPublish(version=version))
    return await replied(trainer, version)


@pytest.fixture
def receivers(tmp_path: Path) -> dict[str, Receiver]:
    return {name: Receiver(tmp_path / name.replace("/", "-")) for name in (A, B)}


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_weights_may_change_once_they_are_exported(receivers: dict[str, Receiver], encoding: str) -> None:
    """What is served is what was exported, whatever the trainer did to its tensors while it travelled."""

    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            weights = model(0)
            for version in (1, 2, 3):
                trainer.let.clear()
                copy = {name: tensor.clone() for name, tensor in weights.items()}
                exported = await publications.begin(request(version, encoding=encoding), of(weights))
                assert exported == wire.Exported(version=version)
                for tensor in weights.values():
                    tensor.add_(1)
                publications.finish(asked(version), wire.FinishPublish(version=version))
                await asyncio.sleep(0.02)
                assert version not in trainer.replies
                trainer.let.set()
                await replied(trainer, version)
                assert cast(wire.Published, trainer.replies[version]).apply_seconds.keys() == {A, B}
                assert all(same(receiver.served[version], copy) for receiver in receivers.values())

    asyncio.run(run())


def test_a_version_waits_until_the_one_before_is_sent(receivers: dict[str, Receiver]) -> None:
    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            first, second = model(0), stepped(model(0), 1)
            await publications.begin(request(1), of(first))
            following = asyncio.create_task(publications.begin(request(2), of(second)))
            await asyncio.sleep(0.05)
            assert not following.done()
            trainer.let.set()
            await following
            await outcome(trainer, publications, 2)
            assert same(receivers[A].served[1], first)
            assert same(receivers[A].served[2], second)

    asyncio.run(run())


def test_a_version_that_is_kept_is_sent_as_it_was(receivers: dict[str, Receiver]) -> None:
    async def refuse(_: Publisher) -> None:
        raise AssertionError("the weights are others by now")

    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            trainer.let.set()
            weights = model(0)
            await publications.begin(request(1, [A]), of(weights))
            await publications.begin(request(1, [B]), refuse)
            await outcome(trainer, publications, 1)
            assert same(receivers[B].served[1], weights)
            await publications.begin(request(2), of(stepped(weights, 1)))  # both have the base
            await outcome(trainer, publications, 2)
            assert cast(wire.Published, trainer.replies[2]).repaired == {}
            assert cast(wire.Published, trainer.replies[2]).delta_bytes is not None
            publications.forget()
            with pytest.raises(AssertionError, match="others by now"):
                await publications.begin(request(2), refuse)

    asyncio.run(run())


def test_what_fails_after_the_export_is_told_when_it_is_asked_for(receivers: dict[str, Receiver]) -> None:
    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            trainer.damage = lambda _, sent: [] if isinstance(sent[0], wire.WeightsEnd) else [sent]
            with pytest.raises(HetrlError, match="version 1 is not being published; the last one is None"):
                publications.finish(asked(0), wire.FinishPublish(version=1))
            await publications.begin(request(1), of(model(0)))
            with pytest.raises(HetrlError, match="version 2 is not being published; the last one is 1"):
                publications.finish(asked(0), wire.FinishPublish(version=2))
            trainer.let.set()
            await outcome(trainer, publications, 1)
            failed = trainer.replies[1]
            assert isinstance(failed, wire.Failed)
            assert f"{A} did not answer; {B} did not answer" in failed.cause

    asyncio.run(run())


def test_an_export_that_fails_leaves_no_base(receivers: dict[str, Receiver]) -> None:
    async def broken(_: Publisher) -> None:
        raise HetrlError("out of memory")

    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            with pytest.raises(HetrlError, match="out of memory"):
                await publications.begin(request(1), broken)
            trainer.let.set()
            weights = model(0)
            await publications.begin(request(1), of(weights))
            await outcome(trainer, publications, 1)
            assert same(receivers[A].served[1], weights)

    asyncio.run(run())


def test_what_is_under_way_is_given_up_at_the_end(receivers: dict[str, Receiver]) -> None:
    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            await publications.begin(request(1), of(model(0)))
            publications.finish(asked(1), wire.FinishPublish(version=1))
            await publications.close()
            assert trainer.replies == {}
            assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_who_is_behind_is_brought_to_the_newest_version_beside_the_next_ones(receivers: dict[str, Receiver]) -> None:
    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            trainer.let.set()
            weights = {version: stepped(model(0), version) for version in (1, 2, 3)}
            await publications.begin(request(1), of(weights[1]))
            await outcome(trainer, publications, 1)
            publications.catch_up(asked(9), wire.CatchUp(version=2, receivers=(B,)))
            await publications.begin(request(2, [A]), of(weights[2]))
            caught_up = cast(wire.Published, await replied(trainer, 9))
            assert (caught_up.version, set(caught_up.apply_seconds)) == (2, {B})
            assert same(receivers[B].served[2], weights[2])
            await outcome(trainer, publications, 2)
            await publications.begin(request(3), of(weights[3]))
            assert cast(wire.Published, await outcome(trainer, publications, 3)).repaired == {}

    asyncio.run(run())


def test_one_thing_at_a_time_is_sent_to_a_receiver(receivers: dict[str, Receiver]) -> None:
    """Who came anew while a version is on its way there is brought to it behind that."""

    async def run() -> None:
        async with publishing(receivers) as (trainer, publications):
            await publications.begin(request(1), of(model(0)))
            publications.catch_up(asked(9), wire.CatchUp(version=1, receivers=(B,)))
            await asyncio.sleep(0.1)
            assert 9 not in trainer.replies
            trainer.let.set()
            caught_up = cast(wire.Published, await replied(trainer, 9))
            assert caught_up.repaired == caught_up.failed == {}
            begins = [name for name, sent in trainer.sent if isinstance(sent[0], wire.WeightsBegin)]
            assert sorted(begins) == [A, B]

    asyncio.run(run())
