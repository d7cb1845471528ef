"""What emulated engines keep, publish and send to each other."""

from __future__ import annotations

import asyncio
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest

from hetrl.describe.launching import Emulation
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.places import CheckpointPlaces, EarlierRun
from hetrl.runtime.emulated import checkpoints
from hetrl.runtime.emulated.pace import Pace
from hetrl.runtime.emulated.ranks import EmulatedRank
from hetrl.runtime.emulated.weights import CHANGED, Weights
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.pieces import PIECE_BYTES
from hetrl.runtime.wire.members import World


def test_perturbed_values_stay_within_the_noise_and_repeat_with_the_seed() -> None:
    drawn = [Pace(Emulation(noise=0.1, seed=3), "one").perturbed(10.0) for _ in range(2)]
    assert drawn[0] == drawn[1] != Pace(Emulation(noise=0.1, seed=3), "other").perturbed(10.0)
    pace = Pace(Emulation(noise=0.1), "one")
    values = [pace.perturbed(10.0) for _ in range(1000)]
    assert 9.0 <= min(values) < 9.2 and 10.8 < max(values) <= 11.0
    assert sum(values) / len(values) == pytest.approx(10.0, abs=0.1)
    for parts in (4, 64):  # the variance of a sum of uniform draws
        values = [pace.perturbed(10.0, parts) for _ in range(1000)]
        assert statistics.pstdev(values) == pytest.approx(1.0 / math.sqrt(3 * parts), rel=0.2)


def test_a_version_differs_from_the_one_before_in_as_many_weights_as_a_real_one_does() -> None:
    weights, same = Weights(4, 400_000, seed=1), Weights(4, 400_000, seed=1)
    before = {name: tensor.copy() for name, tensor in weights.tensors()}
    assert all(numpy.array_equal(tensor, before[name]) for name, tensor in same.tensors())
    weights.change()
    changed = sum(int((tensor != before[name]).sum()) for name, tensor in weights.tensors())
    assert weights.size_bytes == 400_000
    assert changed / 200_000 == pytest.approx(CHANGED, rel=0.1)


def test_a_run_that_goes_on_finds_the_checkpoints_of_the_one_before(tmp_path: Path) -> None:
    def kept(places: CheckpointPlaces, step: int, version: int, progress: str) -> None:
        checkpoints.save(places, wire.Save(step=step, version=version, progress=progress), [b"samples"])
        assert step not in places.find(), "not before it is whole"
        checkpoints.finish_save(places, wire.FinishSave(step=step, wait=True, keep=2))

    first = CheckpointPlaces(tmp_path / "one")
    for step in (0, 2, 4, 6):
        kept(first, step, step + 1, f"after {step}")
    then = CheckpointPlaces(tmp_path / "two", (EarlierRun(tmp_path / "one"),))
    assert sorted(then.find()) == [0, 4, 6], "those that are kept, and what the run began with"
    assert checkpoints.restore(then, 6) == (wire.Restored(step=6, version=7, progress="after 6"), b"samples")
    checkpoints.save(then, wire.Save(step=6, version=9, progress="again"), [])
    checkpoints.finish_save(then, wire.FinishSave(step=6, wait=True, keep=2))
    assert checkpoints.restore(then, 6) == (wire.Restored(step=6, version=9, progress="again"), b"")
    with pytest.raises(HetrlError, match="step-00000002"):
        checkpoints.restore(then, 2)


class Wire:
    """Brings what ranks send to those that it is for, and counts the bytes between sites."""

    def __init__(self) -> None:
        self.inboxes: dict[str, asyncio.Queue[Any]] = {}
        self.crossed: dict[tuple[str, str], int] = {}

    def member(self, address: str) -> Member:
        self.inboxes[address] = asyncio.Queue()

        async def send(to: str | list[str], message: wire.Message, buffers: list[bytes] = []) -> None:  # noqa: B006
            for one in [to] if isinstance(to, str) else to:
                if isinstance(message, wire.WanPiece) and message.operation == "emulated piece":
                    link = wire.site_of(address), wire.site_of(one)
                    self.crossed[link] = self.crossed.get(link, 0) + len(buffers[0])
                header = SimpleNamespace(source=address)
                await self.inboxes[one].put(SimpleNamespace(message=message, buffers=buffers, header=header))

        return cast(Member, SimpleNamespace(address=address, send=send, receive=self.inboxes[address].get))


def test_what_crosses_a_link_is_sent_by_the_ranks_at_its_ends_and_all_end_with_the_first() -> None:
    asked = {("a", "b"): PIECE_BYTES + 10.0, ("b", "c"): 7.0, ("c", "a"): 20.5, ("a", "c"): 0.4}

    async def run() -> dict[tuple[str, str], int]:
        between, ranks = Wire(), tuple(wire.address(site, "actor_training.rank", n) for n, site in enumerate("aabbc"))
        world = cast(World, SimpleNamespace(task="actor_training", ranks=ranks))
        members = [EmulatedRank(between.member(address), world) for address in ranks]
        first, *others = [asyncio.create_task(member.serve()) for member in members]
        await asyncio.wait_for(members[0].cross(asked), 10)
        await members[0].end()
        await asyncio.wait_for(asyncio.gather(*others), 10)
        first.cancel()
        return between.crossed

    assert asyncio.run(run()) == {("a", "b"): PIECE_BYTES + 10, ("b", "c"): 7, ("c", "a"): 20}
