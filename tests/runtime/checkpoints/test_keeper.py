"""A checkpoint on its way to another site arrives as it was written, or nothing of it stays; nobody is misled."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints import files, keeper as keeping, writing
from hetrl.runtime.checkpoints.keeper import Keeper, room_of
from hetrl.runtime.checkpoints.places import CheckpointPlaces
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.workload import ACTOR_TRAINING, CRITIC_TRAINING

CONTROLLER, SOURCE, TARGET = "alpha/controller/0", "alpha/keeper/0", "beta/keeper/1"
ROOM = room_of(1000, 2, None)
WEIGHTS = bytes(range(256)) * 40
Said = tuple[wire.Message, list[bytes]]
Damage = Callable[[wire.Message, wire.Message, list[bytes]], Said]  # what is asked, and what is answered to it


class Line:
    """In the place of all members: hands messages on, and lets answers be damaged on their way."""

    def __init__(self, damage: Damage | None = None) -> None:
        self.inboxes: dict[str, asyncio.Queue[tuple[Envelope, asyncio.Future[Said]]]] = {}
        self.damage, self.parts = damage, 0

    def member(self, address: str) -> Member:
        return cast(Member, _End(self, address))


class _End:
    def __init__(self, line: Line, address: str) -> None:
        self.line, self.address = line, address
        self._open: dict[int, asyncio.Future[Said]] = {}
        line.inboxes[address] = asyncio.Queue()

    async def receive(self) -> Envelope:
        envelope, answer = await self.line.inboxes[self.address].get()
        self._open[id(envelope)] = answer
        return envelope

    async def reply(self, envelope: Envelope, message: wire.Message, buffers: Sequence[bytes] = ()) -> None:
        self._open.pop(id(envelope)).set_result((message, list(buffers)))

    async def request(self, to: str, message: wire.Message, *, timeout_seconds: float, doing: str) -> Any:
        answer: asyncio.Future[Said] = asyncio.get_running_loop().create_future()
        header = cast(Any, SimpleNamespace(source=self.address))
        await self.line.inboxes[to].put((Envelope(header, message, ()), answer))
        said, buffers = await answer
        if self.line.damage is not None:
            said, buffers = self.line.damage(message, said, buffers)
        if isinstance(said, wire.Failed):
            raise HetrlError(said.cause)
        return Envelope(cast(Any, None), said, tuple(memoryview(one) for one in buffers))


def checkpoint(root: Path, step: int, weights: bytes = WEIGHTS) -> Path:
    directory = files.path_of(root, step)
    partial = writing.begin(directory)
    writing.write(partial / "model.safetensors", [memoryview(weights)])
    writing.write(partial / "empty", [])
    writing.write_json(partial / files.STATE, {"format": files.FORMAT, "id": step})
    writing.finish(directory)
    return directory


def root_at(site: Path, task: str = ACTOR_TRAINING) -> Path:
    return site / files.root_of(task)


def asked(work: Path, *messages: wire.Message, damage: Damage | None = None) -> list[wire.Message | str]:
    """Ask the keeper of beta, beside that of alpha, one thing after another; return its answers or why it refused."""

    async def scenario() -> list[wire.Message | str]:
        line, answers = Line(damage), list[wire.Message | str]()
        sites = {SOURCE: work / "alpha", TARGET: work / "beta"}
        keepers = [
            Keeper(line.member(address), lambda task, site=site: CheckpointPlaces(root_at(site, task)), ROOM)
            for address, site in sites.items()
        ]
        serving = [asyncio.create_task(keeper.serve()) for keeper in keepers]
        controller = line.member(CONTROLLER)
        for message in messages:
            if isinstance(message, wire.TakeCheckpoint):
                lend = wire.LendCheckpoint(task=message.task, step=message.step, to=TARGET)
                assert (await controller.request(SOURCE, lend, timeout_seconds=1, doing="test")).message == wire.Done()
            try:
                reply = await controller.request(TARGET, message, timeout_seconds=1, doing="test")
                answers.append(reply.message)
            except HetrlError as error:
                answers.append(str(error))
        assert not any(task.done() for task in serving)
        for task in serving:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return answers

    return asyncio.run(scenario())


def take(step: int, task: str = ACTOR_TRAINING, source: str = SOURCE) -> wire.TakeCheckpoint:
    return wire.TakeCheckpoint(task=task, step=step, source=source)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("task", [ACTOR_TRAINING, CRITIC_TRAINING])
def test_a_copy_is_the_same_and_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    monkeypatch.setattr(keeping, "PART_BYTES", 1000)  # more parts than are under way at once
    written = checkpoint(root_at(tmp_path / "alpha", task), 4)
    taken, found, again = asked(tmp_path, take(4, task), wire.FindCheckpoints(task=task), take(4, task))
    assert contents(files.path_of(root_at(tmp_path / "beta", task), 4)) == contents(written)
    assert isinstance(taken, wire.CheckpointTaken) and taken.bytes == files.bytes_of(written)
    assert found == wire.FoundCheckpoints(steps=(4,))
    assert isinstance(again, wire.CheckpointTaken) and again.bytes == 0


def test_the_newest_copies_stay_and_that_of_the_beginning(tmp_path: Path) -> None:
    for step in (0, 2, 4, 6):
        checkpoint(root_at(tmp_path / "alpha"), step)
    asked(tmp_path, *(take(step) for step in (0, 2, 4, 6)))
    assert sorted(files.whole(root_at(tmp_path / "beta"))) == [0, 4, 6]


def flipped(question: wire.Message, answer: wire.Message, buffers: list[bytes]) -> Said:
    if isinstance(question, wire.ReadCheckpoint) and question.file == "model.safetensors":
        return answer, [bytes([buffers[0][0] ^ 1]) + buffers[0][1:]]
    return answer, buffers


def cut(question: wire.Message, answer: wire.Message, buffers: list[bytes]) -> Said:
    return answer, [one[:-1] for one in buffers]


def gone(question: wire.Message, answer: wire.Message, buffers: list[bytes]) -> Said:
    if isinstance(question, wire.ReadCheckpoint) and question.file == files.STATE:
        return wire.Failed(cause="no answer to a part", exit_code=1), []
    return answer, buffers


def nonsense(question: wire.Message, answer: wire.Message, buffers: list[bytes]) -> Said:
    if isinstance(question, wire.ReadCheckpoint) and question.file in (files.DIGESTS, files.COMPLETE):
        return answer, [b"[" + b" " * (len(buffers[0]) - 2) + b"]"]
    return answer, buffers


def lists(**more: int) -> Damage:
    def damage(question: wire.Message, answer: wire.Message, buffers: list[bytes]) -> Said:
        if isinstance(answer, wire.CheckpointListed):
            return wire.CheckpointListed(files={**answer.files, **more}), buffers
        return answer, buffers

    return damage


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (flipped, "model.safetensors is not what was written"),
        (cut, "sent something else than"),
        (gone, "no answer to a part"),
        (nonsense, "it is without its digests"),
        (lists(**{"COMPLETE.digest": 3}), "what it lists is no checkpoint"),
        (lists(**{"../keys.json": 3}), "what it lists is no checkpoint"),
        (lists(**{".launcher": 3}), "what it lists is no checkpoint"),
        (lists(**{"/etc/passwd": 3}), "what it lists is no checkpoint"),
        (lists(more=2**40), "more than a checkpoint of this model has"),
        (lists(more=-1), "more than a checkpoint of this model has"),
    ],
)
def test_what_is_damaged_cut_off_or_false_leaves_nothing(tmp_path: Path, damage: Damage, cause: str) -> None:
    checkpoint(root_at(tmp_path / "alpha"), 2)
    asked(tmp_path, take(2))
    before = contents(files.path_of(root_at(tmp_path / "beta"), 2))
    checkpoint(root_at(tmp_path / "alpha"), 4)
    (refused, found) = asked(tmp_path, take(4), wire.FindCheckpoints(task=ACTOR_TRAINING), damage=damage)
    assert cause in str(refused)
    assert found == wire.FoundCheckpoints(steps=(2,))
    assert [path.name for path in root_at(tmp_path / "beta").iterdir()] == ["step-00000002"]
    assert contents(files.path_of(root_at(tmp_path / "beta"), 2)) == before


@pytest.mark.parametrize("state", [b"[]", b"[1]", b"3", b'"x"', b'{"format": 1}', b"\xff"])
def test_what_is_proven_and_no_checkpoint_is_taken_up_by_nobody(tmp_path: Path, state: bytes) -> None:
    """As a site may send that was broken into: each file has its digest."""
    directory = files.path_of(root_at(tmp_path / "alpha"), 4)
    partial = writing.begin(directory)
    writing.write(partial / files.STATE, [state])
    writing.finish(directory)
    shutil.copytree(directory, files.path_of(root_at(tmp_path / "beta"), 4))
    (found,) = asked(tmp_path, wire.FindCheckpoints(task=ACTOR_TRAINING))
    assert found == wire.FoundCheckpoints(steps=())


def test_what_is_not_there_or_no_training_is_refused(tmp_path: Path) -> None:
    half = files.partial_of(files.path_of(root_at(tmp_path / "alpha"), 6))
    half.mkdir(parents=True)
    missing, strange, other = asked(
        tmp_path, take(6), take(6, "../.."), wire.FindCheckpoints(task="reference_inference")
    )
    assert "no whole checkpoint of actor_training after step 6 is here" in str(missing)
    assert "no task that has checkpoints" in str(strange)
    assert "no task that has checkpoints" in str(other)


def test_a_part_of_what_was_not_listed_or_lies_elsewhere_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "beta").mkdir()
    (tmp_path / "beta" / "keys.json").write_text("secret")
    checkpoint(root_at(tmp_path / "beta"), 4)

    def read(file: str, count: int = 3, offset: int = 0) -> wire.ReadCheckpoint:
        return wire.ReadCheckpoint(task=ACTOR_TRAINING, step=4, file=file, offset=offset, bytes=count)

    listing = wire.ListCheckpoint(task=ACTOR_TRAINING, step=4)
    refused = [
        *(read(name) for name in ("../../keys.json", "keys\0.json", "keys\n.json")),
        *(read("COMPLETE", keeping.PART_BYTES + 1), read("COMPLETE", offset=-1)),
    ]
    beyond = read("COMPLETE", offset=2**63)  # no file system has it: one that asks so ends nothing
    lend = wire.LendCheckpoint(task=ACTOR_TRAINING, step=4, to=CONTROLLER)
    _, first, _, fine, *others, far, lost = asked(
        tmp_path, lend, read("COMPLETE"), listing, read("COMPLETE"), *refused, beyond, read("x")
    )
    assert isinstance(fine, wire.CheckpointRead)
    assert all("not of a checkpoint that was listed" in str(answer) for answer in (first, *others))
    assert "int" in str(far)
    assert "No such file" in str(lost)


def test_a_checkpoint_goes_only_to_whom_it_is_lent(tmp_path: Path) -> None:
    for step in (4, 6):
        checkpoint(root_at(tmp_path / "beta"), step)
    listings = [wire.ListCheckpoint(task=ACTOR_TRAINING, step=step) for step in (4, 6)]
    read = wire.ReadCheckpoint(task=ACTOR_TRAINING, step=4, file="COMPLETE", offset=0, bytes=3)
    lends = [wire.LendCheckpoint(task=ACTOR_TRAINING, step=4, to=to) for to in ("gamma/keeper/0", CONTROLLER)]
    answers = asked(tmp_path, listings[0], read, lends[0], listings[0], lends[1], *listings, read)
    refused = "the checkpoint of actor_training after step {} is not lent to alpha/controller/0"
    assert [answer for answer in answers if isinstance(answer, str)] == [refused.format(step) for step in (4, 4, 4, 6)]
    assert isinstance(answers[5], wire.CheckpointListed)
    assert isinstance(answers[7], wire.CheckpointRead)


def test_a_disk_without_room_is_named_before_anything_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(root_at(tmp_path / "alpha"), 4)
    usage = keeping.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(keeping.shutil, "disk_usage", lambda path: usage._replace(free=100))
    (refused,) = asked(tmp_path, take(4))
    assert "make room, or name another site in checkpoints.copy_to" in str(refused)
