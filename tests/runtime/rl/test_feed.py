"""Admission and the sweep of the feed, with draws that end when the test says so."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.data.prompts import Prompt
from hetrl.runtime.rl.feed import Feed, Position, capacity, oldest_version
from hetrl.runtime.rl.sampling import PromptGroup


def group(number: int, *versions: int) -> PromptGroup:
    spans = tuple(wire.VersionSpan(version=v, start=n, end=n + 1) for n, v in enumerate(versions))
    sample = wire.Sample(
        tokens=(1,) * len(versions), logprobs=(0.0,) * len(versions), versions=spans, finish_reason="stop"
    )
    return PromptGroup(Prompt(str(number), ""), (0,), (sample,), (0.0,))


class Rollouts:
    """Draws that start at once and end when told, under the version of that moment."""

    def __init__(self) -> None:
        self.version = 1
        self.open: dict[int, asyncio.Future[PromptGroup]] = {}
        self.started: list[tuple[int, int]] = []

    async def draw(self, number: int) -> PromptGroup:
        self.started.append((number, self.version))
        self.open[number] = asyncio.get_running_loop().create_future()
        return await self.open[number]

    def end(self, number: int, *versions: int) -> None:
        self.open.pop(number).set_result(group(number, *(versions or (self.version,))))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def numbers(groups: tuple[PromptGroup, ...]) -> list[int]:
    return [int(g.prompt.text) for g in groups]


@given(st.integers(0, 4), st.integers(0, 50), st.integers(1, 8), st.integers(0, 99), st.integers(0, 99))
def test_capacity_is_the_published_rule(
    staleness: int, iterations: int, batch: int, accepted: int, running: int
) -> None:
    left = capacity(staleness, iterations, batch, accepted, running)
    assert left + accepted + running == batch * (staleness + 1) + batch * iterations


def test_without_staleness_an_iteration_starts_when_its_weights_are_served() -> None:
    async def scenario() -> None:
        rollouts = Rollouts()
        feed = Feed(rollouts.draw, batch=2, max_staleness=0, iterations=3, version=1)
        first = asyncio.ensure_future(feed.batch(1))
        await settle()
        assert rollouts.started == [(0, 1), (1, 1)]
        rollouts.end(1)
        rollouts.end(0)
        assert numbers(await first) == [0, 1]
        await settle()
        assert rollouts.started == [(0, 1), (1, 1)]
        rollouts.version = 2
        feed.trained()
        feed.served(2)
        await settle()
        assert rollouts.started[2:] == [(2, 2), (3, 2)]

    asyncio.run(scenario())


def test_staleness_one_draws_one_batch_ahead_and_no_further_than_the_last_iteration() -> None:
    async def scenario() -> None:
        rollouts = Rollouts()
        feed = Feed(rollouts.draw, batch=2, max_staleness=1, iterations=2, version=1)
        first = asyncio.ensure_future(feed.batch(1))
        await settle()
        assert [number for number, _ in rollouts.started] == [0, 1, 2, 3]
        for number in (3, 2):
            rollouts.end(number)
        assert numbers(await first) == [2, 3]
        feed.trained()
        feed.served(2)
        await settle()
        assert len(rollouts.started) == 4
        second = asyncio.ensure_future(feed.batch(2))
        await settle()
        rollouts.end(0, 1, 2)
        rollouts.end(1, 1)
        assert numbers(await second) == [0, 1]
        assert feed.dropped == 0

    asyncio.run(scenario())


def test_a_batch_waits_for_the_groups_that_the_next_one_may_not_take() -> None:
    async def scenario() -> None:
        rollouts = Rollouts()
        feed = Feed(rollouts.draw, batch=2, max_staleness=1, iterations=3, version=1)
        first = asyncio.ensure_future(feed.batch(1))
        await settle()
        for number in (1, 2):
            rollouts.end(number)
        assert numbers(await first) == [1, 2]
        rollouts.version = 2
        feed.trained()
        feed.served(2)
        await settle()
        assert sorted(rollouts.open) == [0, 3, 4, 5]
        second = asyncio.ensure_future(feed.batch(2))
        for number in (4, 5, 3):
            rollouts.end(number, 2)
        await settle()
        assert not second.done()
        rollouts.end(0, 1, 2)
        assert numbers(await second) == [0, 3]
        rollouts.version = 3
        feed.trained()
        feed.served(3)
        assert numbers(await feed.batch(3)) == [4, 5]
        assert feed.dropped == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_that_is_taken_early_has_only_what_its_version_may_have(staleness: int) -> None:
    """While the first batch is trained, the second is asked for."""

    async def scenario() -> None:
        rollouts = Rollouts()
        feed = Feed(rollouts.draw, batch=2, max_staleness=staleness, iterations=3, version=1)
        first = asyncio.ensure_future(feed.batch(1))
        await settle()
        for number in [*rollouts.open]:
            rollouts.end(number)
        assert numbers(await first) == [0, 1]
        second = asyncio.ensure_future(feed.batch(2))
        await settle()
        assert second.done() == (staleness == 1)  # drawn under version 1, like the first
        rollouts.version = 2
        feed.trained()
        feed.served(2)
        await settle()
        assert len(rollouts.open) == 2
        for number in [*rollouts.open]:
            rollouts.end(number)
        assert numbers(await second) == [2, 3]
        third = asyncio.ensure_future(feed.batch(3))
        await settle()
        assert third.done() == (staleness == 1)
        await feed.close()
        third.cancel()

    asyncio.run(scenario())


def test_a_group_that_got_too_old_is_dropped_counted_and_replaced() -> None:
    async def scenario() -> None:
        rollouts = Rollouts()
        feed = Feed(rollouts.draw, batch=1, max_staleness=1, iterations=3, version=1)
        first = asyncio.ensure_future(feed.batch(1))
        await settle()
        rollouts.end(1, 1)
        assert numbers(await first) == [1]
        for version in (2, 3):
            rollouts.version = version
            feed.trained()
            feed.served(version)
        second = asyncio.ensure_future(feed.batch(3))
        await settle()
        rollouts.end(0, 1, 3)
        await settle()
        assert feed.dropped == 1
        assert sorted(rollouts.open) == [2, 3]
        rollouts.end(2, 2)
        assert numbers(await second) == [2]
        await feed.close()

    asyncio.run(scenario())


def of(number: int, *, equal: bool) -> PromptGroup:
    (sample,) = group(number, 1).samples
    return PromptGroup(Prompt(str(number), ""), (0,), (sample, sample), (1.0, 1.0 if equal else 0.0))


def fed(
    equal: set[int], order: random.Random, *, batch: int, iterations: int, max_draws: int, max_staleness: int = 0
) -> tuple[list[list[int]], list[tuple[int, int]], Feed]:
    """Return the batches, what was drawn under which version, and the feed, of draws that end in a random order."""
    drawn, found = list[tuple[int, int]](), list[list[int]]()

    async def scenario() -> Feed:
        version = 1

        async def draw(number: int) -> PromptGroup:
            drawn.append((number, version))
            began = version
            for _ in range(order.randrange(6)):
                await asyncio.sleep(0)
            return replace(of(number, equal=number in equal), samples=group(number, began).samples * 2)

        feed = Feed(draw, batch, max_staleness, iterations, version, max_draws)
        for _ in range(iterations):
            found.append(numbers(await feed.batch(version)))
            version += 1
            feed.trained()
            feed.served(version)
        await feed.close()
        return feed

    feed = asyncio.run(scenario())
    return found, drawn, feed


def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts_under_the_same_version() -> None:
    found, drawn, feed = fed({1, 2, 5}, random.Random(0), batch=3, iterations=2, max_draws=3)
    assert found == [[0, 3, 4], [6, 7, 8]]
    assert sorted(drawn) == [*((n, 1) for n in range(5)), *((n, 2) for n in range(5, 9))]
    assert (feed.rejected, feed.dropped) == (3, 0)


def test_after_so_many_draws_a_batch_is_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found, drawn, feed = fed({0, 1, 3, 4, 5}, random.Random(0), batch=3, iterations=1, max_draws=2)
    assert found == [[0, 1, 2]] and feed.rejected == 3
    assert [number for number, _ in drawn] == [0, 1, 2, 3, 4, 5]
    assert "a batch has 2 groups of equal rewards, since 3 others were rejected already" in caplog.text


def test_without_dynamic_sampling_equal_rewards_are_like_others() -> None:
    found, _, feed = fed({0, 1}, random.Random(0), batch=2, iterations=2, max_draws=1)
    assert found == [[0, 1], [2, 3]] and feed.rejected == 0


@given(st.sets(st.integers(0, 30)), st.integers(1, 4), st.integers(2, 3), st.randoms(use_true_random=False))
def test_without_staleness_batches_do_not_depend_on_who_comes_back_first(
    equal: set[int], batch: int, max_draws: int, order: random.Random
) -> None:
    found, drawn, feed = fed(equal, order, batch=batch, iterations=3, max_draws=max_draws)
    again, _, _ = fed(equal, random.Random(1), batch=batch, iterations=3, max_draws=max_draws)
    assert found == again
    assert sorted(number for number, _ in drawn) == list(range(3 * batch + feed.rejected))
    first = 0
    for one in found:  # as long as prompts may be drawn, those that say something, in their order
        allowed = range(first, first + max_draws * batch)
        says = [number for number in allowed if number not in equal][:batch]
        filled = [number for number in allowed if number in equal][: batch - len(says)]
        assert one == sorted(says + filled)
        first = says[-1] + 1 if len(says) == batch else allowed.stop


@given(
    st.sets(st.integers(0, 40)),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_every_prompt_is_drawn_once_and_trained_on_dropped_or_rejected(
    equal: set[int], batch: int, max_staleness: int, max_draws: int, order: random.Random
) -> None:
    found, drawn, feed = fed(equal, order, batch=batch, iterations=4, max_draws=max_draws, max_staleness=max_staleness)
    trained = [number for one in found for number in one]
    assert [number for number, _ in drawn] == list(range(len(drawn)))
    assert len(set(trained)) == len(trained) == 4 * batch
    assert len(drawn) - len(trained) == feed.dropped + feed.rejected
    assert feed.rejected <= 4 * (max_draws - 1) * batch
    versions = dict(drawn)
    for step, one in enumerate(found):
        assert all(step + 1 - max_staleness <= versions[number] <= step + 1 for number in one)
    for version in range(1, 5):
        started = sum(began <= version for _, began in drawn)
        assert started - feed.rejected - feed.dropped <= (max_staleness + version) * batch


def test_a_failed_draw_ends_the_batch() -> None:
    async def draw(number: int) -> PromptGroup:
        raise HetrlError(f"group {number}")

    async def scenario() -> None:
        feed = Feed(draw, batch=1, max_staleness=0, iterations=1, version=1)
        with pytest.raises(HetrlError, match="group 0"):
            await feed.batch(1)

    asyncio.run(scenario())


def test_the_oldest_token_counts() -> None:
    assert oldest_version(group(0, 5, 4, 6)) == 4


def drawn_in_lives(ends: list[int], order: random.Random, **of_feed: Any) -> tuple[list[list[int]], Position]:
    """Return the batches that are trained on, and the last position, of a run that ends and goes on after some steps.

    Whenever it ends, the next batch may have been taken, and draws are under way.
    """
    found, start = list[list[int]](), Position()
    kept = dict[int, PromptGroup]()  # what was drawn before the last end
    iterations, batch, equal = of_feed["iterations"], of_feed["batch"], of_feed["equal"]

    async def live(start: Position, end: int) -> Position:
        async def draw(number: int) -> PromptGroup:
            if number in kept:
                return kept[number]
            began = version
            for _ in range(order.randrange(6)):
                await asyncio.sleep(0)
            return replace(of(number, equal=number in equal), samples=group(number, began).samples * 2)

        version = 1 + start.batches
        settings = (batch, of_feed["max_staleness"], iterations, version, of_feed["max_draws"])
        feed = Feed(draw, *settings, start, {n: oldest_version(one) for n, one in kept.items()})
        for _ in range(start.batches, end):
            groups = await feed.batch(version)
            assert all(version - oldest_version(one) <= of_feed["max_staleness"] for one in groups)
            assert all(kept.get(number, one) is one for number, one in zip(numbers(groups), groups, strict=True))
            found.append(numbers(groups))
            version += 1
            feed.trained()
            feed.served(version)
        if order.random() < 0.5 and end < iterations:
            await feed.batch(version)
        position = feed.position
        kept.clear()
        kept.update({number: one for number, one in feed.finished.items() if number in position.again})
        await feed.close()
        return position

    for end in [*ends, iterations]:
        start = asyncio.run(live(start, end))
        assert start.batches == end
    return found, start


@given(
    st.sets(st.integers(0, 40)),
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(st.integers(0, 5), max_size=3).map(sorted),
    st.integers(0, 2**16),
)
def test_a_run_that_ends_and_goes_on_skips_no_prompt_and_trains_on_none_twice(
    equal: set[int], batch: int, max_staleness: int, max_draws: int, ends: list[int], seed: int
) -> None:
    settings = {"batch": batch, "iterations": 5, "max_staleness": max_staleness, "max_draws": max_draws, "equal": equal}
    found, position = drawn_in_lives(ends, random.Random(seed), **settings)
    trained = [number for one in found for number in one]
    assert len(set(trained)) == len(trained) == 5 * batch
    settled = position.following - len(position.again)
    assert settled == len(trained) + position.dropped + position.rejected
    assert not {*position.again} & {*trained}
    if not max_staleness:
        assert found == drawn_in_lives([], random.Random(1), **settings)[0]
