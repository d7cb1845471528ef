"""Versions reach the replicas in step; those behind come after, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from hetrl.dispatch import Capacity, Dispatch
from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.draws import Draws
from hetrl.runtime.rl.learner import Versions
from hetrl.runtime.rl.serving import Serving
from hetrl.runtime.rl.tasks import Trainer
from hetrl.runtime.rl.timeline import Timeline
from hetrl.runtime.transport.links import Links
from hetrl.runtime.transport.member import Member

A, B, C = "a/actor_generation/0", "b/actor_generation/0", "b/actor_generation/1"


class Actor:
    """A trainer that serves everybody; those that are behind one by one, as they are let."""

    def __init__(self) -> None:
        self.exported: list[tuple[int, tuple[str, ...], int, float]] = []
        self.left_out: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self.coming: dict[str, asyncio.Future[wire.Published]] = {}  # by the first of those that are brought

    async def export(self, version: int, to: Sequence[str], *, quorum: int, patience_seconds: float) -> None:
        self.exported.append((version, tuple(to), quorum, patience_seconds))

    async def published(self, version: int, *, quorum: int) -> wire.Published:
        _, to, _, _ = self.exported[-1]
        return self.outcome(version, to, left_out=self.left_out)

    async def catch_up(self, version: int, to: Sequence[str]) -> wire.Published:
        self.asked.append((version, tuple(to)))
        self.coming[to[0]] = asyncio.get_running_loop().create_future()
        return await self.coming[to[0]]

    def outcome(self, version: int, to: Sequence[str], left_out: Mapping[str, str] | None = None) -> wire.Published:
        out = {one: cause for one, cause in (left_out or {}).items() if one in to}
        failed = {one: cause for one, cause in self.failed.items() if one in to}
        applied = {one: 0.1 for one in to if one not in out and one not in failed}
        return wire.Published(
            version=version, digest="d", bytes=1, seconds=0.5, apply_seconds=applied, failed=failed, left_out=out
        )

    def bring(self, version: int, *to: str) -> None:
        self.coming.pop(to[0]).set_result(self.outcome(version, to))


class Notes:
    """What was told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def published(self, published: wire.Published) -> None:
        self.told.append(("published", published.version))

    def replicas_behind(self, version: int, causes: Mapping[str, str]) -> None:
        self.told.append(("behind", version, dict(causes)))

    def replicas_caught_up(self, published: wire.Published) -> None:
        self.told.append(("caught up", published.version, sorted(published.apply_seconds)))


class Scene:
    """Three replicas at two sites, served by `actor`."""

    def __init__(self, planned_seconds: float = 1.0) -> None:
        self.links, self.lost = Links(), dict[str, str]()
        member = cast(Member, SimpleNamespace(links=self.links))
        dispatch = Dispatch({name: Capacity(1, 1) for name in (A, B, C)}, 8, 8)
        self.draws = Draws(member, dispatch, lambda name, error: self.lost.update({name: str(error)}), Timeline())
        self.actor, self.notes, self.versions = Actor(), Notes(), Versions()
        actor = cast(Trainer, self.actor)
        self.serving = Serving(actor, self.draws, self.versions, self.notes, planned_seconds)

    async def moment(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def played(scene: Scene, play: Callable[[], Awaitable[None]]) -> None:
    """Play while replicas that are behind are seen to."""

    async def run() -> None:
        catching_up = asyncio.create_task(scene.serving.catch_up())
        async with asyncio.timeout(20):
            await play()
        assert not catching_up.done()
        catching_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await catching_up
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_version_goes_to_those_in_step_and_the_others_get_the_newest_one_beside() -> None:
    scene = Scene(planned_seconds=100.0)

    async def play() -> None:
        await scene.serving.publish()
        assert scene.actor.exported == [(1, (A, B, C), 1, 200.0)]
        scene.actor.left_out = {C: "it took too long"}
        await scene.serving.publish()
        assert scene.draws.behind == (C,) and scene.draws.in_step == (A, B)
        await scene.moment()
        assert scene.actor.asked == [(2, (C,))]
        await scene.serving.publish()  # waits for nobody
        assert scene.actor.exported[-1][:2] == (3, (A, B))
        scene.actor.bring(2, C)
        await scene.moment()
        assert scene.draws.behind == (C,), "there is a newer one"
        assert scene.actor.asked[-1] == (3, (C,))
        scene.actor.bring(3, C)
        await scene.moment()
        assert scene.draws.in_step == (A, B, C)
        await scene.serving.publish()
        assert scene.actor.exported[-1][1] == (A, B, C)
        behind = ("behind", 2, {C: "it took too long"})
        kinds = [("published", 1), behind, ("published", 2), ("published", 3), ("caught up", 3, [C])]
        assert scene.notes.told[:5] == kinds

    played(scene, play)


def test_sites_come_each_at_its_own_pace() -> None:
    scene = Scene()

    async def play() -> None:
        await scene.serving.publish()
        for name in (A, B, C):
            scene.serving.back(name)
        await scene.moment()
        assert scene.actor.asked == [(1, (A,)), (1, (B, C))]
        await scene.serving.publish()
        assert scene.actor.exported[-1][1:3] == ((), 0), "nobody is in step, and the trainer goes on"
        scene.actor.bring(2, A)
        await scene.moment()
        assert scene.draws.in_step == (A,)
        assert len(scene.actor.asked) == 2, "b is under way"

    played(scene, play)


def test_whoever_is_behind_a_link_that_is_out_is_asked_for_once_it_is_back() -> None:
    scene = Scene()

    async def play() -> None:
        with scene.links.told(scene.draws.link_changed):
            await scene.serving.publish()
            scene.links.lost("b")
            scene.actor.left_out = {B: "out", C: "out"}
            await scene.serving.publish()
            await scene.moment()
            assert scene.actor.asked == []
            scene.links.restored("b")
            await scene.moment()
            assert scene.actor.asked == [(2, (B, C))]

    played(scene, play)


def test_who_cannot_take_a_version_is_lost_but_for_what_went_to_its_life_before() -> None:
    scene = Scene()

    async def play() -> None:
        await scene.serving.publish()
        scene.serving.back(B)
        scene.actor.failed = {B: "restarted", C: "the disk is full"}
        await scene.serving.publish()
        assert scene.lost == {C: "the disk is full"}
        for _ in range(3):
            await scene.moment()
            assert B not in scene.lost and scene.draws.behind == (B,)
            scene.actor.bring(2, B)
        await scene.moment()
        scene.actor.bring(2, B)
        await scene.moment()
        assert scene.lost == {C: "the disk is full", B: "restarted"}

    played(scene, play)


def test_what_goes_wrong_at_the_trainer_ends_it() -> None:
    scene = Scene()

    async def run() -> None:
        await scene.serving.publish()
        scene.serving.back(B)
        catching_up = asyncio.create_task(scene.serving.catch_up())
        await scene.moment()
        scene.actor.coming[B].set_exception(HetrlError("the trainer is gone"))
        with pytest.raises(HetrlError, match="is gone"):
            await catching_up

    asyncio.run(run())


def test_what_a_replica_took_before_it_was_started_again_is_not_what_it_has() -> None:
    """It answers, is ended and is back while another one still loads; and so once more while it is brought."""
    scene = Scene()

    class Late(Actor):
        async def published(self, version: int, *, quorum: int) -> wire.Published:
            scene.serving.back(B)
            return await super().published(version, quorum=quorum)

    scene.serving._actor = cast(Trainer, late := Late())

    async def play() -> None:
        await scene.serving.publish()
        assert scene.draws.behind == (B,) and scene.draws.in_step == (A, C)
        await scene.moment()
        assert late.asked == [(1, (B,))]
        scene.serving.back(B)
        late.bring(1, B)
        await scene.moment()
        assert scene.draws.behind == (B,)
        assert late.asked == [(1, (B,)), (1, (B,))]
        late.bring(1, B)
        await scene.moment()
        assert {*scene.draws.in_step} == {A, B, C} and not scene.lost

    played(scene, play)
