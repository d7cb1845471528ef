"""A checkpoint that some ranks do not see is brought to their sites, once to each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime.checkpoints import files
from hetrl.runtime.checkpoints.places import CheckpointPlaces, EarlierRun
from hetrl.runtime.megatron.engine import MegatronEngine
from hetrl.runtime.run.checkpoint_places import bring, take_up
from hetrl.runtime.wan.torch_world import start_world
from tests.engines.megatron.megatron_worlds import Worlds, store_at
from tests.engines.megatron.test_checkpoint_files import MODEL, RANK, small_checkpoint

RANKS = 4  # two at each of two sites


class Reader:
    """In the place of an engine."""

    def restore(self, directory: Path) -> dict[str, Any]:
        return {"read": str(directory)}


def taken_up(rank: int, port: int, work: Path) -> Any:
    """Return what a rank reads, or why it does not."""
    start_world(rank, RANKS, store_at(rank, port), 60.0, "cpu")
    site = work / ("alpha" if rank < 2 else "beta")
    places = CheckpointPlaces(site / "checkpoints", (EarlierRun(site / "earlier"),), rank % 2, 2)
    try:
        return take_up(places, cast(MegatronEngine, Reader()), 3)["read"]
    except HetrlError as error:
        return str(error)


@pytest.mark.parametrize("name", [MODEL, RANK])
def test_a_checkpoint_that_is_read_where_it_lies_is_proven(worlds: Worlds, tmp_path: Path, name: str) -> None:
    """One file of it is another one, of the same length: both sites have the checkpoint."""
    for site in ("alpha", "beta"):
        written = small_checkpoint(tmp_path / site / "earlier", 3)
    assert all("earlier/step-00000003" in said for said in worlds.run(taken_up, RANKS, tmp_path))
    data = bytearray((written / name).read_bytes())
    data[-2] ^= 1
    (written / name).write_bytes(data)
    answers = worlds.run(taken_up, RANKS, tmp_path)
    assert all(f"beta/earlier/step-00000003: {name} is not what was written" in said for said in answers), answers


def brought(rank: int, port: int, work: Path) -> Any:
    """Return what a rank finds at its site, and which files were written there."""
    start_world(rank, RANKS, store_at(rank, port), 60.0, "cpu")  # it is left when the job ends
    site = work / ("alpha" if rank < 2 else "beta")
    places = CheckpointPlaces(site / "checkpoints", (EarlierRun(site / "earlier"),))
    try:
        found = bring(places.find().get(3), places.written(3))
    except HetrlError as error:
        return str(error)
    return found.relative_to(work), {path.name: path.read_bytes() for path in found.iterdir()}


def test_it_is_the_same_at_every_site(worlds: Worlds, tmp_path: Path) -> None:
    written = small_checkpoint(tmp_path / "alpha" / "earlier", 3)
    whole = {path.name: path.read_bytes() for path in written.iterdir()}
    places = [place for place, found in worlds.run(brought, RANKS, tmp_path) if found == whole]
    here, there = Path("alpha/earlier/step-00000003"), Path("beta/checkpoints/step-00000003")
    assert places == [here, here, there, there]


def test_another_one_of_the_same_step_is_replaced(worlds: Worlds, tmp_path: Path) -> None:
    written = small_checkpoint(tmp_path / "alpha" / "earlier", 3)
    small_checkpoint(tmp_path / "beta" / "earlier", 3, number=8)
    whole = {path.name: path.read_bytes() for path in written.iterdir()}
    assert all(found == whole for _, found in worlds.run(brought, RANKS, tmp_path))


def test_what_nobody_has_is_said_by_all(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(brought, RANKS, tmp_path) == ["step-00000003: no rank sees this checkpoint"] * RANKS


def test_a_disk_that_fails_is_named_by_all(worlds: Worlds, tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "alpha" / "earlier", 3)
    (tmp_path / "beta").mkdir()
    (tmp_path / "beta" / "checkpoints").write_text("no directory")
    answers = worlds.run(brought, RANKS, tmp_path)
    assert all("checkpoints/step-00000003: the checkpoint could not be written" in said for said in answers)


def test_the_latest_run_that_has_a_step_counts(tmp_path: Path) -> None:
    earlier = EarlierRun(tmp_path / "later"), EarlierRun(tmp_path / "first", left_at=3)
    places = CheckpointPlaces(tmp_path / "own", earlier)
    for root, steps in (("first", (0, 2, 4, 6)), ("later", (2, 4)), ("own", ())):
        for step in steps:
            small_checkpoint(tmp_path / root, step)
    found = {step: path.parent.name for step, path in places.find().items()}
    assert found == {0: "first", 2: "later", 4: "later"}
    assert files.path_of(tmp_path / "own", 5) == places.written(5)
