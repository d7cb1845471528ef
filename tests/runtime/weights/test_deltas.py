"""Versions that travel as what changed: every receiver has the bits that were published, or says so and is repaired."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from hetrl.runtime import wire
from hetrl.runtime.weights import publisher
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES
from tests.runtime.weights.receivers import Receiver, Sent, Wire, model, publish, run, same, stepped

PIECE_BYTES = 2048  # so that the tests' tensors have several pieces


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def two(tmp_path: Path) -> Wire:
    return Wire({name: Receiver(tmp_path / name[0]) for name in ("a/x/0", "b/x/0")})


def encodings(line: Wire, to: str, version: int) -> list[str]:
    """Which encodings a version came to a receiver in, in their order."""
    begins = [sent[0] for name, sent in line.sent if name == to and isinstance(sent[0], wire.WeightsBegin)]
    return [begin.encoding for begin in begins if begin.version == version]


def test_versions_are_the_same_bits_at_every_receiver_and_deltas_after_the_first(two: Wire) -> None:
    kept, weights = Kept(), model(0)
    for version in range(1, 6):
        found = publish(two, version, weights, kept)
        for name, receiver in two.receivers.items():
            assert same(receiver.served[version], weights)
            assert encodings(two, name, version) == (["full"] if version == 1 else ["delta"])
            assert receiver.file.held is not None
            assert receiver.file.held.digest == found.digest
        if version == 1:
            assert (found.delta_bytes, found.changed) == (None, None)
        else:
            assert found.delta_bytes is not None
            assert found.delta_bytes < found.bytes / 4
            assert found.changed == pytest.approx(0.01, abs=0.008)
        assert (found.repaired, found.failed) == ({}, {})
        weights = stepped(weights, version)


def test_what_the_trainer_keeps_is_of_its_own(two: Wire) -> None:
    """The engine's tensors change in place between two versions."""
    kept, weights = Kept(), model(0)
    publish(two, 1, weights, kept)
    weights["embed"] += 1
    found = publish(two, 2, weights, kept)
    assert found.changed is not None
    assert found.changed > 0.9
    assert same(two.receivers["a/x/0"].served[2], weights)


def test_a_piece_of_which_all_changed_goes_as_it_is(two: Wire) -> None:
    kept = Kept()
    publish(two, 1, model(0), kept)
    found = publish(two, 2, model(1), kept)
    assert found.delta_bytes is not None
    assert found.bytes * 0.5 < found.delta_bytes <= found.bytes
    assert same(two.receivers["b/x/0"].served[2], model(1))
    pieces = [sent[0] for name, sent in two.sent if isinstance(sent[0], wire.WeightsTensor) and sent[0].version == 2]
    assert {piece.changes for piece in pieces} == {True, False}


def test_a_late_joiner_gets_the_full_set_beside_the_deltas_of_the_others(two: Wire) -> None:
    kept, weights = Kept(), model(0)
    publish(two, 1, weights, kept, to=["a/x/0"])
    for version in (2, 3):
        weights = stepped(weights, version)
        publish(two, version, weights, kept)
    assert encodings(two, "a/x/0", 2) == encodings(two, "b/x/0", 3) == ["delta"]
    assert encodings(two, "b/x/0", 2) == ["full"]
    assert all(same(receiver.served[3], weights) for receiver in two.receivers.values())


def test_who_had_the_version_has_it_still_after_it_was_sent_to_others(two: Wire) -> None:
    """As it is when the reference takes the first version, or a replica catches up."""
    kept, weights = Kept(), model(0)
    publish(two, 1, weights, kept, to=["a/x/0"])
    publish(two, 1, weights, kept, to=["b/x/0"])
    publish(two, 2, stepped(weights, 1), kept)
    assert encodings(two, "a/x/0", 2) == encodings(two, "b/x/0", 2) == ["delta"]


def test_a_receiver_that_started_anew_refuses_the_delta_and_gets_the_full_set(two: Wire) -> None:
    kept, weights = Kept(), model(0)
    publish(two, 1, weights, kept)
    two.receivers["b/x/0"].start()
    weights = stepped(weights, 1)
    found = publish(two, 2, weights, kept)
    assert list(found.repaired) == ["b/x/0"]
    assert "its base is version 1" in found.repaired["b/x/0"]
    assert "here is no version" in found.repaired["b/x/0"]
    assert encodings(two, "b/x/0", 2) == ["delta", "full"]
    assert sorted(found.apply_seconds) == ["a/x/0", "b/x/0"]
    assert same(two.receivers["b/x/0"].served[2], weights)


def test_a_base_that_changed_on_the_disk_is_found_and_repaired(two: Wire) -> None:
    kept, weights = Kept(), model(0)
    publish(two, 1, weights, kept)
    held = two.receivers["a/x/0"].file.held
    assert held is not None
    with held.path.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        byte = file.read(1)
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([byte[0] ^ 1]))
    found = publish(two, 2, stepped(weights, 1), kept)
    assert "digest" in found.repaired["a/x/0"]
    assert same(two.receivers["a/x/0"].served[2], stepped(weights, 1))


def test_a_trainer_that_started_anew_sends_the_full_set(two: Wire) -> None:
    publish(two, 7, model(0), Kept())
    found = publish(two, 8, model(1), Kept())
    assert found.delta_bytes is None
    assert same(two.receivers["a/x/0"].served[8], model(1))


def test_a_publication_that_broke_off_is_no_base(two: Wire) -> None:
    kept, weights = Kept(), model(0)
    publish(two, 1, weights, kept)

    def broken(_: str, sent: Sent) -> Sequence[Sent]:
        if isinstance(sent[0], wire.WeightsTensor):
            raise OSError("the engine is gone")
        return [sent]

    two.damage = broken
    with pytest.raises(OSError, match="engine"):
        publish(two, 2, stepped(weights, 1), kept)
    two.damage = lambda _, sent: [sent]
    weights = stepped(weights, 2)
    found = publish(two, 3, weights, kept)
    assert found.delta_bytes is None
    assert all(same(receiver.served[3], weights) for receiver in two.receivers.values())


def test_a_replayed_delta_and_that_of_another_run_are_refused_and_change_nothing(two: Wire, tmp_path: Path) -> None:
    kept, weights = Kept(), model(0)
    other = Wire({"a/x/0": Receiver(tmp_path / "other")})
    foreign = Kept()
    publish(other, 1, model(9), foreign)
    publish(other, 2, stepped(model(9), 1), foreign)
    for version in (1, 2, 3):
        publish(two, version, weights, kept)
        weights = stepped(weights, version)
    receiver = two.receivers["a/x/0"]
    for line in (two, other):
        old = [sent for name, sent in line.sent if name == "a/x/0" and getattr(sent[0], "version", 0) == 2]
        answers = [_taken(receiver, sent) for sent in old]
        assert isinstance(answers[-1], wire.WeightsRejected)
        assert "its base is version 1" in answers[-1].cause
    found = publish(two, 4, weights, kept)
    assert found.repaired == {}
    assert same(receiver.served[4], weights)


def _taken(receiver: Receiver, sent: Sent) -> wire.Message | None:
    return run(receiver.take(*sent))


class Fault:
    """One damage at one message of a version, to one receiver: seeded, and done once."""

    KINDS = ("flip", "cut", "lose", "twice", "restart", "other base", "other digest", "lose the end")

    def __init__(self, line: Wire, seed: int, version: int) -> None:
        self.random = random.Random(seed)
        self.kind = self.random.choice(self.KINDS)
        self.to = self.random.choice([*line.receivers])
        self.at = self.random.randrange(1, 12)
        self.line, self.version, self.seen, self.done = line, version, 0, False

    def __call__(self, to: str, sent: Sent) -> Sequence[Sent]:
        message, buffers = sent
        if self.done or to != self.to or getattr(message, "version", 0) != self.version:
            return [sent]
        match message, self.kind:
            case wire.WeightsBegin(), "other base":
                self.done = True
                return [(structs.replace(message, base_digest="0" * 32, encoding="delta"), buffers)]
            case wire.WeightsEnd(), "other digest":
                self.done = True
                return [(structs.replace(message, digest="0" * 32), buffers)]
            case wire.WeightsEnd(), "lose the end":
                self.done = True
                return []
            case wire.WeightsTensor(), "flip" | "cut" | "lose" | "twice" | "restart":
                self.seen += 1
                if self.seen == self.at:
                    return self._harm(sent)
        return [sent]

    def _harm(self, sent: Sent) -> Sequence[Sent]:
        message, (buffer,) = sent
        match self.kind:
            case "flip" if buffer:
                place = self.random.randrange(len(buffer))
                damaged = bytearray(buffer)
                damaged[place] ^= 1 << self.random.randrange(8)
                self.done = True
                return [(message, [bytes(damaged)])]
            case "cut" if buffer:
                self.done = True
                return [(message, [buffer[: self.random.randrange(len(buffer))]])]
            case "lose":
                self.done = True
                return []
            case "twice":
                self.done = True
                return [sent, sent]
            case "restart":
                self.done = True
                self.line.receivers[self.to].start()
        return [sent]


@pytest.mark.parametrize("block", range(10))
def test_no_damage_is_ever_served(two: Wire, block: int) -> None:
    """A damage at one message of each version: whatever is served is what was published under that number."""
    kept, weights, published = Kept(), model(block), {}
    done: dict[str, int] = {}
    for version in range(1, 26):
        fault = Fault(two, 1000 * block + version, version)
        two.damage = fault
        published[version] = weights
        found = publish(two, version, weights, kept)
        for name, receiver in two.receivers.items():
            assert all(same(served, published[number]) for number, served in receiver.served.items())
            assert (name in found.apply_seconds) == (version in receiver.served)
            assert [path.suffix for path in receiver.directory.iterdir()].count(".safetensors") <= 1
            receiver.served.clear()
        done[fault.kind] = done.get(fault.kind, 0) + fault.done
        lost = {fault.to} if fault.kind == "lose the end" else set()
        assert set(found.failed) <= lost
        assert set(found.apply_seconds) >= {*two.receivers} - lost
        weights = stepped(weights, version)
    assert sum(done.values()) >= 15, done
    two.damage = lambda _, sent: [sent]
    publish(two, 99, weights, kept)
    assert all(same(receiver.served[99], weights) for receiver in two.receivers.values())
    assert torch.equal(two.receivers["a/x/0"].served[99]["embed"], weights["embed"])
