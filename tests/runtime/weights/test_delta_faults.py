"""Whatever is killed or cut while a version travels, in whichever phase: no replica serves what was not published."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hetrl.runtime import wire
from hetrl.runtime.transport import member as transport_member
from hetrl.runtime.weights import publisher
from tests.engines.transport.transport_runs import hasten, until
from tests.runtime.weights.receivers import model, same, stepped
from tests.runtime.weights.world_of_faults import PARTS, Fault, World, faults, world

ROUNDS = 3  # of the twelve phases: with seven parts 252 faults


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces of small tensors; losses are noticed soon."""
    monkeypatch.setattr(publisher, "PIECE_BYTES", 2048)
    hasten(monkeypatch)
    monkeypatch.setattr(transport_member, "ASK_AFTER_SECONDS", 0.3)


@pytest.mark.parametrize("part", PARTS)
def test_no_version_but_a_published_one_is_ever_served(tmp_path: Path, part: str) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(600), world(tmp_path) as one:
            story = Story(one)
            await story.publish()
            for fault in faults(part, ROUNDS, PARTS.index(part)):
                await story.survive(fault)

    asyncio.run(scenario())


class Story:
    """The versions of a run, and what must be true of each that is served."""

    def __init__(self, one: World) -> None:
        self.world, self.weights, self.version = one, model(0), 0
        self.published: dict[int, dict[str, torch.Tensor]] = {}

    async def publish(self) -> wire.Published | None:
        """Publish the next version."""
        self.version, self.weights = self.version + 1, stepped(self.weights, self.version)
        self.published[self.version] = self.weights
        return await self._publish([*self.world.replicas])

    async def _publish(self, to: Sequence[str]) -> wire.Published | None:
        """Publish the newest version; whatever was loaded meanwhile is what was published under its number."""
        found = await self.world.publish(self.version, self.weights, to)
        for number, tensors in self.world.loads:
            assert same(tensors, self.published[number])
        self.world.loads.clear()
        return found

    async def survive(self, fault: Fault) -> None:
        """Let a fault happen to a version: the next one is everywhere, and the one after that goes as what changed."""
        self.world.fault = fault
        self._check_what_is_lost(fault, await self._publish_and_rest(fault.replica))
        assert fault.done
        self.world.fault = None
        if self.world.replicas[fault.replica].server.ended:  # killed once it had loaded: the next version finds out
            await self._publish_and_rest(fault.replica)
        for replica in self.world.replicas.values():
            replica.began.clear()
        await self._publish_everywhere(back=fault.replica)
        for replica in self.world.replicas.values():
            assert replica.began.count("full") <= 1
        after = await self._publish_everywhere()
        assert after.delta_bytes is not None
        assert after.repaired == {}
        assert all(replica.began[-1] == "delta" for replica in self.world.replicas.values())

    async def _publish_and_rest(self, victim: str) -> wire.Published | None:
        """Publish the next version, and wait until whoever was killed meanwhile is there again."""
        replica = self.world.replicas[victim]
        lives, ended = replica.lives, replica.server.ended
        found = await self.publish()
        if replica.server.ended and found is not None and victim in found.failed:  # its agent goes with it
            await until(lambda: replica.lives > lives)
        assert not ended or replica.lives > lives
        await self.world.at_rest()
        return found

    def _check_what_is_lost(self, fault: Fault, found: wire.Published | None) -> None:
        """A killed gateway and a cut link cost nothing; who is killed costs what it had, and no other one."""
        if fault.part == "trainer":
            return
        assert found is not None
        lost = {fault.replica} if fault.part in ("agent", "server") else set()
        assert set(found.failed) <= lost, found.failed
        assert set(found.apply_seconds) >= {*self.world.replicas} - lost

    async def _publish_everywhere(self, back: str | None = None) -> wire.Published:
        """Publish the next version to all; one that is `back` may miss it for its life before, and gets it alone."""
        found = await self.publish()
        assert found is not None
        assert set(found.failed) <= {back}
        if found.failed:
            alone = await self._publish([*found.failed])
            assert alone is not None
            assert alone.failed == alone.repaired == {}
        for replica in self.world.replicas.values():
            assert replica.serves is not None
            assert replica.serves[0] == self.version
        return found
