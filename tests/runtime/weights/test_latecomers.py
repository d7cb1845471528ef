"""Members that are behind get to the newest version, whatever is published meanwhile, and nothing else is served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights import intake, publisher
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.latecomers import Latecomers
from hetrl.runtime.weights.node_share import NodeShare
from hetrl.runtime.weights.publisher import Publisher
from tests.runtime.weights.receivers import Receiver, Wire, model, published, same, stepped

A, B, C = "a/actor_generation/0", "b/actor_generation/0", "b/actor_generation/1"
Model = dict[str, torch.Tensor]
SPEC = wire.TensorSpec(name="w", dtype="float32", shape=(64,), bytes=256)


class SlowWire(Wire):
    """What is sent to some waits: nothing of it goes on while `held`, but for so many messages that are `let`."""

    def __init__(self, receivers: dict[str, Receiver]) -> None:
        super().__init__(receivers)
        self.held: set[str] = set()
        self.let = 0
        self.abandoned: set[wire.Priority] = set()
        self._moved = asyncio.Event()

    async def _bring(self, to: str, sent: Any) -> wire.Message | None:
        while to in self.held and not self.let:
            self._moved.clear()
            await self._moved.wait()
        self.let -= to in self.held
        return await super()._bring(to, sent)

    def go_on(self, messages: int | None = None) -> None:
        """Let everything pass, or so many messages."""
        self.let, self.held = messages or 0, self.held if messages else set()
        self._moved.set()

    def abandon(self, _: str, priority: wire.Priority, __: str) -> None:
        self.abandoned.add(priority)
        self._moved.set()


class Window(SlowWire):
    """What goes to those that are `far` counts as sent, and never arrives; they say nothing until it is abandoned."""

    def __init__(self, receivers: dict[str, Receiver]) -> None:
        super().__init__(receivers)
        self.far: set[str] = set()

    def open_bytes(self, *_: Any) -> int:
        return 0

    async def send(self, to: Sequence[str], message: wire.Message, buffers: Sequence[Any] = ()) -> None:
        await super().send([name for name in to if name not in self.far], message, buffers)

    async def request(self, to: str, message: wire.Message, **named: Any) -> Envelope:
        if to not in self.far:
            return await super().request(to, message, **named)
        while not self.abandoned:
            await asyncio.sleep(0.01)
        raise HetrlError(f"{to} cannot be reached")


class Trainer:
    """Publishes versions, and remembers what each was."""

    def __init__(self, folder: Path, names: Sequence[str] = (A, B, C), encoding: str = "delta") -> None:
        self.wire = SlowWire({name: Receiver(folder / name.replace("/", "-")) for name in names})
        self.kept, self.version, self.encoding = Kept(), 0, encoding
        self.published: dict[int, Model] = {0: model(0)}

    async def publish(self, to: Sequence[str], share: float = 0.01) -> wire.Published:
        self.version += 1
        self.published[self.version] = stepped(self.published[self.version - 1], self.version, share)
        request = wire.Publish(version=self.version, receivers=tuple(to), quorum=0, encoding=self.encoding)
        return await published(self.wire, request, self.published[self.version], self.kept)

    async def catch_up(self, *to: str, version: int | None = None, gives_way: bool = False) -> wire.Published:
        request = wire.CatchUp(version=version or self.version, receivers=to, gives_way=gives_way)
        async with asyncio.timeout(60):
            return await Latecomers(cast(Member, self.wire), request, self.kept).bring()

    def check(self, *has: str) -> None:
        """Nothing was served that was not published; those that `has` have the newest version."""
        for receiver in self.wire.receivers.values():
            for version, tensors in receiver.served.items():
                assert same(tensors, self.published[version])
        for name in has:
            assert self.wire.receivers[name].newest == self.version

    def sent(self, to: str) -> list[wire.Message]:
        return [sent[0] for name, sent in self.wire.sent if name == to]

    def bytes_to(self, name: str) -> int:
        return sum(len(data) for to, sent in self.wire.sent if to == name for data in sent[1])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of small tensors."""
    monkeypatch.setattr(publisher, "PIECE_BYTES", 2048)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


def test_who_missed_versions_gets_what_changed_and_loads_the_newest(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A, B, C])
        trainer.kept.behind |= {B, C}
        for _ in range(3):
            await trainer.publish([A])
        trainer.wire.sent.clear()
        found = await trainer.catch_up(B, C)
        assert (found.version, set(found.apply_seconds), found.repaired) == (4, {B, C}, {})
        begins = [one for one in trainer.sent(B) if isinstance(one, wire.WeightsBegin)]
        assert [(one.encoding, one.base_version, one.version) for one in begins] == [
            ("delta", version, version + 1) for version in (1, 2, 3)
        ]
        ends = [one for one in trainer.sent(C) if isinstance(one, wire.WeightsEnd)]
        assert [one.load for one in ends] == [False, False, True]
        whole = sum(tensor.nbytes for tensor in trainer.published[4].values())
        assert trainer.bytes_to(B) == trainer.bytes_to(C) < whole / 4
        trainer.check(A, B, C)
        after = await trainer.publish([A, B, C])
        assert after.repaired == {} and after.delta_bytes is not None
        trainer.check(A, B, C)
        assert not trainer.kept.deltas, "nobody is behind"

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["delta", "full"])
def test_a_full_set_stays_what_it_was_while_versions_are_published(tmp_path: Path, encoding: str) -> None:
    """The trainer writes over what it keeps; what is under way to those that are behind is whole all the same."""
    trainer = Trainer(tmp_path, (A, B), encoding)

    async def run() -> None:
        await trainer.publish([A])
        trainer.wire.held = {B}
        coming = asyncio.create_task(trainer.catch_up(B))
        for messages in (1, 1, 2):  # begin, and some pieces
            await asyncio.sleep(0.05)
            trainer.wire.go_on(messages)
            await trainer.publish([A])
        assert not coming.done()
        trainer.wire.go_on()
        found = await coming
        assert (found.version, found.failed, found.repaired) == (4, {}, {})
        trainer.check(A, B)
        received = trainer.wire.receivers[B].served
        assert 1 in received and 4 in received
        whole = sum(isinstance(one, wire.WeightsBegin) and one.encoding == "full" for one in trainer.sent(B))
        assert whole == (1 if encoding == "delta" else 2)
        assert not trainer.kept.anchors

    asyncio.run(run())


def test_what_changed_is_kept_while_there_is_room(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A, B])
        trainer.kept.behind.add(B)
        for _ in range(8):
            await trainer.publish([A], share=0.1)
            assert sum(one.bytes for one in trainer.kept.deltas.values()) <= trainer.kept.bytes / 4
        assert 1 not in trainer.kept.deltas and 8 in trainer.kept.deltas
        trainer.wire.sent.clear()
        await trainer.catch_up(B)
        begins = [one for one in trainer.sent(B) if isinstance(one, wire.WeightsBegin)]
        assert [one.encoding for one in begins] == ["full"]
        trainer.check(A, B)

    asyncio.run(run())


def test_who_was_started_again_with_the_newest_version_gets_it_once_more(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A, B])
        trainer.wire.receivers[B].start()
        trainer.wire.receivers[B].newest = 0
        trainer.wire.sent.clear()
        found = await trainer.catch_up(B)
        assert (found.version, set(found.apply_seconds), found.repaired) == (1, {B}, {})
        begins = [one for one in trainer.sent(B) if isinstance(one, wire.WeightsBegin)]
        assert [one.encoding for one in begins] == ["full"]
        trainer.check(A, B)

    asyncio.run(run())


def test_who_lost_what_it_had_gets_the_full_set(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A, B])
        trainer.kept.behind.add(B)
        await trainer.publish([A])
        trainer.wire.receivers[B].start()
        found = await trainer.catch_up(B)
        assert "here is no version" in found.repaired[B]
        assert (found.failed, set(found.apply_seconds)) == ({}, {B})
        trainer.check(A, B)

    asyncio.run(run())


def test_who_refuses_the_full_set_too_has_failed_and_the_others_go_on(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A])
        trainer.wire.damage = lambda to, sent: [] if to == B and isinstance(sent[0], wire.WeightsTensor) else [sent]
        found = await trainer.catch_up(B, C)
        assert set(found.failed) == {B} and "refused weight version 1" in found.failed[B]
        assert set(found.apply_seconds) == {C}
        trainer.check(A, C)

    asyncio.run(run())


@pytest.mark.parametrize("in_step", [True, False])
def test_who_is_left_out_while_its_word_is_awaited_has_what_it_had(trainer: Trainer, in_step: bool) -> None:
    """Later it gets what changed since, not the full set."""
    line = trainer.wire = Window(trainer.wire.receivers)

    async def publish_without() -> wire.Published:
        trainer.version += 1
        trainer.published[trainer.version] = stepped(trainer.published[trainer.version - 1], trainer.version)
        request = wire.Publish(
            version=trainer.version, receivers=(A, B), quorum=1, patience_seconds=0.1, encoding="delta"
        )
        one = Publisher(cast(Member, line), request, trainer.kept)
        with one.leaving_out():
            await asyncio.to_thread(one.take, trainer.published[trainer.version].items())
            await one.send()
            return await one.finish()

    async def bring_without() -> wire.Published:
        trainer.kept.behind.add(B)
        await trainer.publish([A])
        coming = asyncio.create_task(trainer.catch_up(B))
        await asyncio.sleep(0.05)
        line.links.lost("b")
        return await coming

    async def run() -> None:
        await trainer.publish([A, B])
        line.far = {B}
        assert set((await (publish_without() if in_step else bring_without())).left_out) == {B}
        line.far = set()
        line.links.restored("b")
        line.sent.clear()
        assert set((await trainer.catch_up(B)).apply_seconds) == {B}
        assert [one.encoding for one in trainer.sent(B) if isinstance(one, wire.WeightsBegin)] == ["delta"]
        trainer.check(A, B)

    asyncio.run(run())


def test_who_counts_on_another_of_its_node_that_is_ahead_takes_the_full_set_by_itself(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B and C share a node, B takes versions for it; C is brought one that B has no more."""
    monkeypatch.setattr(intake, "SHARE_SECONDS", 3600.0)
    trainer.wire.receivers |= {name: Receiver(tmp_path / name[-1], NodeShare(tmp_path)) for name in (B, C)}

    async def run() -> None:
        await trainer.publish([B, C])
        assert trainer.wire.receivers[C].intake.follows
        trainer.kept.behind.add(C)
        del trainer.kept.proven[C]
        trainer.wire.held = {C}
        coming = asyncio.create_task(trainer.catch_up(C))
        await asyncio.sleep(0.05)
        await trainer.publish([B])
        trainer.wire.go_on()
        found = await coming
        assert (found.failed, set(found.apply_seconds)) == ({}, {C})
        assert "does not have it" in found.repaired[C]
        trainer.check(B, C)

    asyncio.run(run())


def test_what_several_that_are_behind_still_need_is_kept_once() -> None:
    kept, message = Kept(), wire.WeightsTensor(version=1, tensor=SPEC, offset=0, bytes=SPEC.bytes, digest="d")
    held, _ = kept.room_for(SPEC)
    kept.version, kept.pieces = 1, {(SPEC.name, 0): message}
    with kept.anchor() as first, kept.anchor() as second, kept.anchor() as done:
        assert first is not None and second is not None and done is not None
        done.read(message)
        kept.replace((SPEC.name, 0), held, np.ones(SPEC.bytes, np.uint8))
        was = first.read(message)
        assert was == bytes(SPEC.bytes) and second.read(message) is was


def test_whoever_is_behind_a_link_that_goes_out_goes_on_later(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A])
        trainer.wire.held = {B}
        coming = asyncio.create_task(trainer.catch_up(B))
        await asyncio.sleep(0.05)
        trainer.wire.links.lost("b")
        trainer.wire.go_on()
        found = await coming
        assert found.left_out == {B: "the link to b is out"} and not found.apply_seconds
        await trainer.publish([A])
        assert (await trainer.catch_up(B)).left_out
        trainer.wire.links.restored("b")
        assert set((await trainer.catch_up(B)).apply_seconds) == {B}
        trainer.check(A, B)

    asyncio.run(run())


@pytest.mark.parametrize("gives_way", [False, True])
def test_all_that_a_receiver_gets_goes_through_one_channel(trainer: Trainer, gives_way: bool) -> None:
    channel = wire.Priority.LATER_WEIGHTS if gives_way else wire.Priority.WEIGHTS

    async def run() -> None:
        await trainer.publish([A])
        trainer.wire.sent.clear()
        await trainer.catch_up(B, gives_way=gives_way)
        assert {wire.priority_of(message) for message in trainer.sent(B)} == {channel}
        trainer.wire.links.lost("b")
        await trainer.catch_up(B, gives_way=gives_way)
        assert trainer.wire.abandoned == {channel}

    asyncio.run(run())


def test_a_version_that_is_not_published_yet_is_waited_for(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A])
        coming = asyncio.create_task(trainer.catch_up(B, version=2))
        await asyncio.sleep(0.2)
        assert not coming.done()
        await trainer.publish([A])
        assert (await coming).version == 2
        trainer.check(A, B)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_all_have_the_newest_version_in_the_end(tmp_path: Path, seed: int) -> None:
    """Versions are published to those in step; others come, stop, lose their files or their link, at random."""
    draws = random.Random(seed)
    trainer = Trainer(tmp_path, encoding=draws.choice(["delta", "delta", "full"]))
    in_step, coming = {A, B, C}, dict[str, asyncio.Task[wire.Published]]()

    async def settled() -> None:
        for name in [name for name, task in coming.items() if task.done()]:
            found = coming.pop(name).result()
            trainer.wire.held.discard(name)
            assert found.failed == {}
            if name in found.apply_seconds and found.version == trainer.version:
                in_step.add(name)

    async def something() -> None:
        name = draws.choice([B, C])
        match draws.randrange(6):
            case 0 | 1:
                await trainer.publish(sorted(in_step))
                trainer.check(*in_step)
            case 2 if name in in_step:
                in_step.discard(name)
                trainer.kept.behind.add(name)
            case 3 if name not in in_step and name not in coming:
                receiver = trainer.wire.receivers[name]
                receiver.start()  # with no file that it counts on
                receiver.newest = 0
            case 4:
                trainer.wire.held = trainer.wire.held ^ {name} if name in coming else trainer.wire.held - {name}
                trainer.wire.go_on(draws.randrange(1, 5))
            case 5 if name not in in_step and name not in coming:
                coming[name] = asyncio.create_task(trainer.catch_up(name))
        await asyncio.sleep(draws.choice([0.0, 0.01]))
        await settled()

    async def run() -> None:
        await trainer.publish([A, B, C])
        for _ in range(30):
            async with asyncio.timeout(60):
                await something()
        trainer.wire.go_on()
        await asyncio.gather(*coming.values())
        await settled()
        if late := sorted({B, C} - in_step):
            await trainer.catch_up(*late)
        trainer.check(A, B, C)

    asyncio.run(run())


def test_a_catch_up_that_is_given_up_leaves_nothing_behind(trainer: Trainer) -> None:
    async def run() -> None:
        await trainer.publish([A])
        trainer.wire.held = {B}
        coming = asyncio.create_task(trainer.catch_up(B))
        await asyncio.sleep(0.05)
        assert trainer.kept.anchors and trainer.kept.behind
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming
        assert not trainer.kept.anchors and not trainer.kept.behind

    asyncio.run(run())
