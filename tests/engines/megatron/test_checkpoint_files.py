"""Checkpoints as directories: whole or passed over, kept or removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hetrl.errors import HetrlError
from hetrl.runtime.checkpoints import files as checkpoint, writing
from hetrl.runtime.megatron.checkpoint import Contents, complete, rank_file
from hetrl.runtime.megatron.snapshot import Snapshot, write_parts
from hetrl.runtime.megatron.tensor_files import name_of

MODEL, RANK = "model-00001-of-00001.safetensors", rank_file(0)
CONTENTS = Contents({0: MODEL}, {0: RANK}, {"a": (2, 3)}, ("exp_avg",))


def begun(root: Path, step: int, box: tuple[tuple[int, int], ...] = ((0, 2), (0, 3)), number: int = 7) -> Path:
    """Write the files of a checkpoint of one tensor, of whose moments a rank has a box."""
    directory = checkpoint.path_of(root, step)
    partial = writing.begin(directory)
    tensor = torch.arange(6.0).reshape(2, 3) + step
    model, rank = Snapshot(), Snapshot()
    model.add("a", tensor)
    rank.add(name_of("exp_avg", "a", box), tensor[tuple(slice(*ends) for ends in box)])
    write_parts(partial / MODEL, model.parts())
    write_parts(partial / RANK, rank.parts())
    writing.write_json(partial / checkpoint.STATE, {"format": checkpoint.FORMAT, "step": step, "id": number})
    return directory


def small_checkpoint(root: Path, step: int, number: int = 7) -> Path:
    """Write a whole checkpoint of one tensor; `number` is what tells it from others."""
    directory = begun(root, step, number=number)
    complete(directory, CONTENTS)
    return directory


def newest(root: Path) -> Path:
    """Return the whole checkpoint of the highest step."""
    return next(iter(checkpoint.whole(root).values()))


def break_off(directory: Path) -> None:
    """Leave a checkpoint as a writer that was killed leaves it."""
    (directory / checkpoint.COMPLETE).unlink()


def truncate(directory: Path) -> None:
    path = directory / MODEL
    path.write_bytes(path.read_bytes()[:-4])


def lose(directory: Path) -> None:
    (directory / MODEL).unlink()


def garble(directory: Path) -> None:
    (directory / checkpoint.COMPLETE).write_text("{")


def other_format(directory: Path) -> None:
    text = json.dumps({"format": "hetrl-checkpoint/1"})
    (directory / checkpoint.STATE).write_text(text)
    (directory / checkpoint.COMPLETE).write_text(json.dumps({checkpoint.STATE: len(text)}))


@pytest.mark.parametrize("damage", [break_off, truncate, lose, garble, other_format])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    older, newer = (small_checkpoint(tmp_path, step) for step in (9, 10))
    assert newest(tmp_path) == newer
    damage(newer)
    with pytest.raises(HetrlError, match="step-00000010: (half-written, it cannot be loaded|its format is)"):
        checkpoint.read_state(newer)
    assert newest(tmp_path) == older


def test_the_last_whole_checkpoints_are_kept(tmp_path: Path) -> None:
    directories = [small_checkpoint(tmp_path, step) for step in (1, 2, 9, 10, 11)]
    break_off(directories[2])
    writing.begin(checkpoint.path_of(tmp_path, 12))
    removed = checkpoint.keep_last(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]
    assert len(removed) == 4
    with pytest.raises(HetrlError, match="keep at least 1"):
        checkpoint.keep_last(tmp_path, 0)


def test_a_damaged_checkpoint_does_not_count_among_the_kept(tmp_path: Path) -> None:
    older, newer = (small_checkpoint(tmp_path, step) for step in (1, 2))
    truncate(newer)
    assert checkpoint.keep_last(tmp_path, 1) == []
    assert newest(tmp_path) == older


def test_fewer_are_kept_where_they_take_too_much_and_one_that_is_in_use(tmp_path: Path) -> None:
    directories = [small_checkpoint(tmp_path, step) for step in (0, 1, 2, 3, 4)]
    gb = checkpoint.bytes_of(directories[-1]) / 1e9
    checkpoint.keep_last(tmp_path, 3, 2.5 * gb, spared=[1])
    assert sorted(checkpoint.whole(tmp_path)) == [0, 1, 3, 4]
    checkpoint.keep_last(tmp_path, 3, 0.1 * gb)
    assert sorted(checkpoint.whole(tmp_path)) == [0, 4]


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    directory = small_checkpoint(tmp_path, 3)
    leftover = writing.begin(directory)
    (leftover / MODEL).write_text("half")
    assert small_checkpoint(tmp_path, 3) == directory
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]
    tensors = load_file(directory / MODEL)
    assert tensors["a"].tolist() == [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]


def test_without_checkpoints_none_is_found(tmp_path: Path) -> None:
    assert not checkpoint.whole(tmp_path / "nowhere")
    (tmp_path / "step-x").mkdir()
    assert not checkpoint.whole(tmp_path)


def test_what_was_never_completed_is_not_taken_up(tmp_path: Path) -> None:
    older = small_checkpoint(tmp_path, 1)
    newer = begun(tmp_path, 2)
    assert newest(tmp_path) == older
    with pytest.raises(HetrlError, match="step-00000002: no checkpoint there"):
        checkpoint.read_state(newer)
    complete(newer, CONTENTS)
    assert newest(tmp_path) == newer


def cut_off(partial: Path) -> None:
    path = partial / RANK
    path.write_bytes(path.read_bytes()[:-4])


def lose_rank(partial: Path) -> None:
    (partial / RANK).unlink()


def lose_model(partial: Path) -> None:
    (partial / MODEL).unlink()


@pytest.mark.parametrize("damage", [cut_off, lose_rank, lose_model])
def test_a_file_that_is_not_whole_keeps_the_checkpoint_from_its_name(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    directory = begun(tmp_path, 1)
    damage(checkpoint.partial_of(directory))
    with pytest.raises(HetrlError, match="safetensors: not whole"):
        complete(directory, CONTENTS)
    assert not checkpoint.whole(tmp_path)


def test_values_that_no_rank_wrote_keep_the_checkpoint_from_its_name(tmp_path: Path) -> None:
    directory = begun(tmp_path, 1, box=((0, 1), (0, 3)))
    with pytest.raises(HetrlError, match="exp_avg of a: the ranks wrote 3 of 6 values"):
        complete(directory, CONTENTS)


def test_the_index_says_where_each_slice_is(tmp_path: Path) -> None:
    directory = small_checkpoint(tmp_path, 1)
    index = json.loads((directory / "optimizer.index.json").read_text())
    assert index == {"exp_avg": {"a": {"0:2, 0:3": RANK}}}
    model = json.loads((directory / "model.safetensors.index.json").read_text())
    assert model["weight_map"] == {"a": MODEL}


def test_a_snapshot_is_a_safetensors_file_however_its_chunks_fall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetrl.runtime.megatron.snapshot.CHUNK_BYTES", 16)
    tensors = {
        "a": torch.arange(35.0).reshape(5, 7),
        "b": torch.arange(6.0).bfloat16(),
        "c": torch.arange(5, dtype=torch.uint8),
        "d": torch.arange(12.0).reshape(3, 4).T,
    }
    snapshot = Snapshot()
    for name, tensor in tensors.items():
        snapshot.add(name, tensor)
    tensors["b"].zero_()
    write_parts(tmp_path / "file.safetensors", snapshot.parts())
    found = load_file(tmp_path / "file.safetensors")
    assert torch.equal(found.pop("b"), torch.arange(6.0).bfloat16())
    assert found.keys() == tensors.keys() - {"b"}
    assert all(torch.equal(found[name], tensors[name]) for name in found)


def arrived(source: Path, root: Path) -> Path:
    """Bring the files of a checkpoint elsewhere, where it has no name yet."""
    target = root / source.name
    partial = writing.begin(target)
    for path in source.iterdir():
        writing.write(partial / path.name, [memoryview(path.read_bytes())])
    return target


def test_what_arrives_is_proven_by_the_digests_that_were_written(tmp_path: Path) -> None:
    target = arrived(small_checkpoint(tmp_path / "a", 3), tmp_path / "b")
    writing.prove(target)
    writing.give_name(target)
    names = [{path.name for path in root.rglob("*")} for root in (tmp_path / "a", tmp_path / "b")]
    assert names[0] == names[1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def take_digest_away(path: Path) -> None:
    digests = json.loads((path.parent / checkpoint.DIGESTS).read_text())
    del digests[path.name]
    (path.parent / checkpoint.DIGESTS).write_text(json.dumps(digests))


@pytest.mark.parametrize("damage", [flip, take_digest_away, Path.unlink, lambda path: (path.parent / "more").touch()])
def test_what_is_damaged_on_its_way_gets_no_name(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    source = small_checkpoint(tmp_path / "a", 3)
    damage(source / MODEL)
    with pytest.raises(HetrlError, match="digests are not those of its files|is not what was written"):
        writing.prove(arrived(source, tmp_path / "b"))
