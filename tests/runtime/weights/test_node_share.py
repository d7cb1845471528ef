"""Replicas of one node: one takes a version, all have its file; none counts on one that does not have it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from hetrl.runtime import wire
from hetrl.runtime.temporary import PREFIX
from hetrl.runtime.weights import intake, node_directory as room
from hetrl.runtime.weights.kept import Kept
from hetrl.runtime.weights.node_directory import name_for, node_directory
from hetrl.runtime.weights.node_share import NodeShare
from tests.runtime.weights.receivers import Receiver, Sent, Wire, model, publish, same, stepped

LEADER, OTHER = "a/x/0", "a/x/1"
NAME = f"{PREFIX}x"


@pytest.fixture
def node(tmp_path: Path) -> Wire:
    """Two replicas that share a node; the first one takes what arrives first, and so leads."""
    return Wire({name: Receiver(tmp_path / name[-1], NodeShare(tmp_path)) for name in (LEADER, OTHER)})


def file_of(line: Wire, name: str) -> Path:
    held = line.receivers[name].file.held
    assert held is not None
    return held.path


def serves(line: Wire, name: str, version: int, weights: object) -> bool:
    return same(line.receivers[name].served[version], weights)  # type: ignore[arg-type]


def test_one_takes_a_version_and_all_have_its_file(node: Wire) -> None:
    kept, weights = Kept(), model(0)
    for version in range(1, 5):
        found = publish(node, version, weights, kept)
        assert all(serves(node, name, version, weights) for name in (LEADER, OTHER))
        assert file_of(node, LEADER).samefile(file_of(node, OTHER))
        assert found.repaired == {}
        assert len(list(file_of(node, OTHER).parent.glob("*"))) == 1
        weights = stepped(weights, version)


def test_the_pieces_of_a_version_come_once_to_a_node_whoever_takes_them(node: Wire) -> None:
    kept, weights = Kept(), model(0)
    publish(node, 1, weights, kept)
    node.sent.clear()  # nobody had said anything
    weights = stepped(weights, 1)
    publish(node, 2, weights, kept)
    assert {to for to, (one, _) in node.sent if isinstance(one, wire.WeightsTensor)} == {LEADER}
    assert all(serves(node, name, 2, weights) for name in (LEADER, OTHER))
    share = node.receivers.pop(LEADER).share
    assert share is not None
    share.close()
    node.sent.clear()
    publish(node, 3, weights, kept)
    assert {to for to, (one, _) in node.sent if isinstance(one, wire.WeightsTensor)} == {OTHER}
    assert serves(node, OTHER, 3, weights)


def test_one_that_leads_all_at_once_and_got_no_pieces_gets_the_full_set(node: Wire) -> None:
    """The one that took them is started again, the other is faster to lead, and nobody has said so yet."""
    kept, weights = Kept(), model(0)
    publish(node, 1, weights, kept)
    leader, other = node.receivers[LEADER].share, node.receivers[OTHER].share
    assert leader is not None and other is not None
    leader.close()
    assert other.leads()
    for version in (2, 3):
        weights = stepped(weights, version)
        assert list(publish(node, version, weights, kept).repaired) == ([OTHER] if version == 2 else [])
        assert all(serves(node, name, version, weights) for name in (LEADER, OTHER))


def test_a_version_that_the_other_missed_is_there_when_it_asks(node: Wire) -> None:
    kept = Kept()
    publish(node, 1, model(0), kept, to=[LEADER])
    assert publish(node, 1, model(0), kept, to=[OTHER]).repaired == {}
    assert serves(node, OTHER, 1, model(0))


def test_when_the_one_that_took_them_is_gone_another_one_does(node: Wire) -> None:
    kept, weights = Kept(), model(0)
    publish(node, 1, weights, kept)
    share = node.receivers.pop(LEADER).share
    assert share is not None
    share.close()
    for version in (2, 3):  # its base is the file that it shared
        weights = stepped(weights, version)
        assert publish(node, version, weights, kept).repaired == {}
        assert serves(node, OTHER, version, weights)


def test_what_is_damaged_is_served_by_none_and_repaired_for_all(node: Wire) -> None:
    kept, weights = Kept(), model(0)
    publish(node, 1, weights, kept)

    def flip(to: str, sent: Sent) -> Sequence[Sent]:
        message, buffers = sent
        if to == LEADER and isinstance(message, wire.WeightsTensor) and message.changes:
            return [(message, [buffers[0][:-1] + bytes([buffers[0][-1] ^ 1])])]
        return [sent]

    node.damage = flip
    weights = stepped(weights, 2)
    assert list(publish(node, 2, weights, kept).repaired) == [LEADER]
    assert all(serves(node, name, 2, weights) for name in (LEADER, OTHER))


def test_one_that_leads_and_takes_nothing_is_not_waited_for_again(node: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, weights = Kept(), model(0)
    publish(node, 1, weights, kept)
    monkeypatch.setattr(intake, "SHARE_SECONDS", 0.1)
    for version in (2, 3):
        weights = stepped(weights, version)
        found = publish(node, version, weights, kept, to=[OTHER])
        assert list(found.repaired) == ([OTHER] if version == 2 else [])
        assert serves(node, OTHER, version, weights)


class Usage(NamedTuple):
    free: int


@pytest.mark.parametrize(
    ("free", "expected"),
    [({"disk": 30, "memory": 30}, "disk"), ({"disk": 29, "memory": 30}, "memory"), ({"disk": 0, "memory": 0}, "site")],
)
def test_the_first_place_with_room_is_taken_and_left_as_it_was(
    free: dict[str, int], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("disk", "memory", "site"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    monkeypatch.setattr(room, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(room.shutil, "disk_usage", lambda place: Usage(free[Path(place).name]))
    with node_directory(NAME, 10, 0, tmp_path / "site") as (first, lead):
        free["disk"] = free["memory"] = 0
        with node_directory(NAME, 10, 1, tmp_path / "site") as (second, other):
            assert first.parent == second.parent == tmp_path / expected / NAME
            assert all(one.stat().st_mode & 0o777 == 0o700 for one in (first, second, first.parent))
            assert (lead.leads(), other.leads()) == (True, False)
        (first / "version-1.safetensors").touch()
        lead.offer(first / "version-1.safetensors", 1, "digest")
    assert list((tmp_path / expected).iterdir()) == []


def test_what_a_killed_replica_left_is_removed_by_its_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / NAME / "0" / "version-1.part"
    left.parent.mkdir(parents=True, mode=0o700)
    left.parent.parent.chmod(0o700)
    left.touch()
    with node_directory(NAME, 0, 0, tmp_path) as (directory, _):
        assert directory == left.parent
        assert not left.exists()


def test_a_directory_that_others_may_read_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / NAME).mkdir(mode=0o755)
    (tmp_path / NAME).chmod(0o755)
    with node_directory(NAME, 0, 0, tmp_path) as (directory, _):
        assert directory.parent.name.startswith(f"{NAME}.")
        assert directory.parent.stat().st_mode & 0o777 == 0o700


def test_runs_of_two_sites_at_one_path_do_not_meet(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    name = name_for(run)
    assert name == name_for(run)
    run.parent.rename(tmp_path / "site of the first")
    run.mkdir(parents=True)
    assert name_for(run) != name


def test_the_shared_directory_is_made_again_when_the_last_replica_removes_it_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made: list[Path] = []

    def removed_once(place: Path, name: str) -> Path:
        shared = private(place, name)
        made.append(shared)
        if len(made) == 1:
            shared.rmdir()
        return shared

    private = room._private
    monkeypatch.setattr(room, "_private", removed_once)
    with node_directory(NAME, 0, 0, tmp_path) as (directory, share):
        assert directory.is_dir()
        assert share.leads()
    assert len(made) == 2
