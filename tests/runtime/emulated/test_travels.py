"""Versions of actor and critic on one link take what the link gives them, whenever they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from hetrl.cost.model import CostModel
from hetrl.describe.launching import Emulation
from hetrl.plan.plan import Plan
from hetrl.runtime.emulated import play
from hetrl.runtime.emulated.pace import Pace
from hetrl.runtime.emulated.travels import Travels
from tests.runtime.emulated.emulated_cases import Jumping, with_critic

SPEED = 0.5


def arrivals(mode: str, leave: dict[str, float]) -> dict[str, float]:
    """Return when versions are there that leave at these emulated moments."""
    plan, model = with_critic(mode)
    found: dict[str, float] = {}

    async def run() -> None:
        travels, pace = Travels(plan, model), Pace(Emulation(speed=SPEED, noise=0.0), "test")

        async def one(name: str) -> None:
            await pace.until(leave[name])
            await travels.travel(name, pace)
            found[name] = pace.now

        await asyncio.gather(*map(one, leave))

    with asyncio.Runner(loop_factory=Jumping) as runner:
        runner.run(run())
    return found


def alone(mode: str, name: str) -> float:
    plan, model = with_critic(mode)
    (found,) = play.versions(plan, [(name, 0.0)], model)
    return found


def delayed(mode: str) -> float:
    """Return how much later a critic's version arrives that leaves with the actor's."""
    plan, model = with_critic(mode)
    return play.versions(plan, [("actor", 0.0), ("critic", 0.0)], model)[1] - alone(mode, "critic")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_version_that_is_alone_takes_what_it_is_played_to_take(mode: str) -> None:
    actor, critic = alone(mode, "actor"), alone(mode, "critic")
    found = arrivals(mode, {"actor": 0.0, "critic": 2 * actor})
    assert found == pytest.approx({"actor": actor, "critic": 2 * actor + critic})


def test_a_critic_that_leaves_behind_the_actor_waits_for_what_is_left_of_it_on_their_link() -> None:
    late = delayed("sync") / 2
    found = arrivals("sync", {"actor": 0.0, "critic": late})
    assert found["critic"] == pytest.approx(alone("sync", "critic") + delayed("sync"), rel=0.02)
    assert found["actor"] == pytest.approx(alone("sync", "actor"), rel=0.02)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_critic_that_is_under_way_gives_way_once_the_actors_leaves(mode: str) -> None:
    critic = alone(mode, "critic")
    found = arrivals(mode, {"actor": critic / 2, "critic": 0.0})
    shared = delayed("sync") if mode == "sync" else critic / 2  # all of the actor's, or half of the link for the rest
    assert found["critic"] == pytest.approx(critic + shared, rel=0.1)


def test_what_is_played_stays_short_where_something_is_always_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = with_critic("async")
    played, versions = list[int](), play.versions

    def noted(plan: Plan, leave: Sequence[tuple[str, float]], model: CostModel) -> list[float]:
        played.append(len(leave))
        return versions(plan, leave, model)

    monkeypatch.setattr(play, "versions", noted)

    async def run() -> None:
        travels, pace = Travels(plan, model), Pace(Emulation(noise=0.1), "test")

        async def again_and_again(name: str, times: int) -> None:
            for _ in range(times):
                await travels.travel(name, pace)

        await asyncio.gather(again_and_again("actor", 10), again_and_again("critic", 80))

    with asyncio.Runner(loop_factory=Jumping) as runner:
        runner.run(run())
    assert len(played) == 90 and max(played) < 30


def test_a_critic_is_as_fast_as_alone_once_the_actors_version_has_left_their_link() -> None:
    actor, critic = alone("sync", "actor"), alone("sync", "critic")
    late = 0.9 * actor  # which is on its way to others
    found = arrivals("sync", {"actor": 0.0, "critic": late})
    assert found["critic"] == pytest.approx(late + critic, rel=0.02)
