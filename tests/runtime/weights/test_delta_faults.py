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
from tests.engines.transport.transport_runs import BETA, BETA_1, hasten, until
from tests.runtime.weights.receivers import model, same, stepped
from tests.runtime.weights.world_of_faults import PARTS, PHASES, Fault, World, faults, world

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


@pytest.mark.parametrize("part", ["server", "gateway beta"])
def test_who_is_brought_to_the_newest_version_comes_whatever_happens_meanwhile(tmp_path: Path, part: str) -> None:
    """From nothing, beside two versions for the other one, with a fault in each phase of it."""

    async def scenario() -> None:
        async with asyncio.timeout(600), world(tmp_path) as one:
            story = Story(one)
            await story.publish([BETA])
            for phase in PHASES["replica"]:
                await one.replicas[BETA_1].restart()
                await story.bring(BETA_1)
                story.check_serves()
                await one.replicas[BETA_1].restart()
                one.fault = Fault(part, phase, BETA_1, 0.0)
                coming = asyncio.create_task(story.bring(BETA_1))
                for _ in range(2):
                    found = await story.publish([BETA])
                    assert found is not None
                    assert set(found.apply_seconds) == {BETA}
                await coming
                assert one.fault.done
                one.fault = None
                await one.at_rest()
                if one.replicas[BETA_1].server.ended:  # once it had loaded: whoever asks next finds out
                    await story.publish()
                    await one.at_rest()
                await story.bring(BETA_1)
                story.check_serves()
                for replica in one.replicas.values():
                    replica.began.clear()
                after = await story.publish()
                assert after is not None
                assert after.repaired == after.failed == {}
                assert all(replica.began == ["delta"] for replica in one.replicas.values())

    asyncio.run(scenario())


class Story:
    """The versions of a run, and what must be true of each that is served."""

    def __init__(self, one: World) -> None:
        self.world, self.weights, self.version = one, model(0), 0
        self.published: dict[int, dict[str, torch.Tensor]] = {}

    async def publish(self, to: Sequence[str] | None = None) -> wire.Published | None:
        """Publish the next version, to all or to some."""
        self.version, self.weights = self.version + 1, stepped(self.weights, self.version)
        self.published[self.version] = self.weights
        found = await self.world.publish(self.version, self.weights, [*self.world.replicas] if to is None else to)
        self.check_loads()
        return found

    def check_loads(self) -> None:
        """Whatever was loaded is what was published under its number."""
        for number, tensors in self.world.loads:
            assert same(tensors, self.published[number])
        self.world.loads.clear()

    def check_serves(self) -> None:
        """All serve the newest version."""
        self.check_loads()
        for replica in self.world.replicas.values():
            assert replica.serves is not None
            assert replica.serves[0] == self.version

    async def bring(self, replica: str) -> None:
        """Bring a replica to the newest version, as often as its life before is what fails; versions go on."""
        for _ in range(5):
            found = await self.world.catch_up(self.version, [replica])
            if replica in found.apply_seconds and found.version == self.version:
                return
        raise AssertionError(f"{replica} does not come: {found}")

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
            alone = await self.world.catch_up(self.version, [*found.failed])
            assert alone.failed == alone.repaired == {}
        self.check_serves()
        return found
