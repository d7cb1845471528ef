"""An emulated server on a clock of its own: what it draws, in how long, and what happens to it meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hetrl.cost.generation import Server, server_of
from hetrl.cost.stages import place_all
from hetrl.describe.launching import Emulation
from hetrl.errors import HetrlError
from hetrl.lengths import Lengths
from hetrl.runtime import wire
from hetrl.runtime.emulated.pace import Pace
from hetrl.runtime.emulated.server import EmulatedIdle, EmulatedServer, Replica
from tests.runtime.emulated.emulated_cases import MODEL, PLAN, Jumping

FILLER, STOP = 9, 1


def stages() -> Server:
    task = PLAN.tasks["actor_generation"]
    return server_of(place_all("actor_generation", task.replicas[:1], MODEL)[0])


def sampling(most: int) -> wire.Sampling:
    return wire.Sampling(samples=1, max_tokens=most, temperature=1.0, top_p=1.0, seed=0, stop_tokens=(STOP,))


def served(
    body: Callable[[EmulatedServer], Awaitable[object]],
    response: Lengths,
    limit: int = 8,
    noise: float = 0.0,
    tokens_each: int = 1,
) -> None:
    """Run a server that has weights beside a body, on a clock that jumps to the next thing that is waited for."""

    async def run() -> None:
        pace = Pace(Emulation(speed=1000.0, noise=noise), "replica")
        server = EmulatedServer(Replica(stages(), limit, 0.5, response, FILLER, tokens_each), pace)
        await server.load_weights(1, Path("none"), 1.0)
        engine = asyncio.create_task(server.run())
        try:
            await asyncio.wait_for(body(server), 60)
        finally:
            engine.cancel()

    with asyncio.Runner(loop_factory=Jumping) as runner:
        runner.run(run())


def test_a_response_ends_with_its_stop_token_and_knows_the_version_of_each_of_its_tokens() -> None:
    async def body(server: EmulatedServer) -> None:
        (sample,) = await server.generate((2, 3), sampling(200), 10.0)
        assert sample.tokens == (FILLER,) * 99 + (STOP,)
        assert (len(sample.logprobs), sample.finish_reason) == (100, "stop")
        assert sample.versions == (wire.VersionSpan(1, 0, 100),)

    served(body, Lengths(100, 100))


def test_a_response_that_another_server_began_is_as_long_as_it_was_to_be() -> None:
    async def body(server: EmulatedServer) -> None:
        (first,) = await server.generate((2, 3), sampling(64), 10.0)
        assert (len(first.tokens), first.finish_reason) == (64, "length")
        (rest,) = await server.generate((2, 3, *first.tokens), sampling(64), 10.0)
        assert (len(rest.tokens), rest.finish_reason) == (36, "stop")

    served(body, Lengths(100, 100))


def test_a_response_that_ends_where_a_stretch_does_is_not_drawn_on() -> None:
    async def body(server: EmulatedServer) -> None:
        (sample,) = await server.generate((2, 3), sampling(64), 10.0)
        assert (len(sample.tokens), sample.tokens[-1], sample.finish_reason) == (64, STOP, "stop")

    served(body, Lengths(64, 256, "empirical", values=(64,)))


def test_a_response_that_may_not_be_longer_is_cut_off() -> None:
    async def body(server: EmulatedServer) -> None:
        (sample,) = await server.generate((2, 3), sampling(64), 10.0)
        assert (sample.tokens, sample.finish_reason) == ((FILLER,) * 64, "length")

    served(body, Lengths(64, 64))


def test_lengths_have_the_mean_that_the_planner_was_told() -> None:
    async def body(server: EmulatedServer) -> None:
        drawn = await asyncio.gather(*(server.generate((2, n), sampling(400), 10.0) for n in range(10, 410)))
        lengths = [len(sample.tokens) for (sample,) in drawn]
        assert min(lengths) < 50 and max(lengths) == 400
        assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.1)

    served(body, Lengths(100, 400, "lognormal"), limit=400, noise=0.1)


def test_no_more_sequences_run_at_once_than_the_cache_holds() -> None:
    """Of four draws one may have begun when the first is done and a version arrives."""

    async def body(server: EmulatedServer) -> None:
        drawing = [asyncio.ensure_future(server.generate((2, n), sampling(500), 60.0)) for n in range(4)]
        await asyncio.wait(drawing, return_when=asyncio.FIRST_COMPLETED)
        await server.update_weights(2, Path("none"), 1.0)
        drawn = await asyncio.gather(*drawing)
        under = sorted([span.version for span in sample.versions] for (sample,) in drawn)
        assert under[0] == [1] and under[2:] == [[2], [2]]

    served(body, Lengths(500, 500), limit=1)


def test_a_version_that_arrives_counts_for_the_tokens_that_follow() -> None:
    async def body(server: EmulatedServer) -> None:
        drawing = asyncio.ensure_future(server.generate((2, 3), sampling(5000), 60.0))
        await asyncio.sleep(0.02)
        await server.update_weights(2, Path("none"), 1.0)
        (sample,) = await drawing
        assert [span.version for span in sample.versions] == [1, 2]
        assert sample.versions[0].end == sample.versions[1].start and sample.versions[1].end == 5000

    served(body, Lengths(5000, 5000))


def test_a_server_that_sleeps_draws_nothing_until_it_wakes_with_the_weights_that_it_lacks() -> None:
    async def body(server: EmulatedServer) -> None:
        idle = EmulatedIdle(server, Pace(Emulation(speed=1000.0), "replica"), 0.1)
        assert not await idle.sleep("offload", keep_weights=False)
        drawing = asyncio.ensure_future(server.generate((2, 3), sampling(10), 60.0))
        await asyncio.sleep(0.05)
        assert idle.asleep and not drawing.done()
        await idle.wake(lambda: server.load_weights(7, Path("none"), 1.0))
        ((sample,), asleep) = await drawing, idle.asleep
        assert not asleep and sample.versions == (wire.VersionSpan(7, 0, 10),)

    served(body, Lengths(10, 10))


def test_a_draw_that_is_given_up_leaves_its_place() -> None:
    async def body(server: EmulatedServer) -> None:
        drawing = asyncio.ensure_future(server.generate((2, 3), sampling(10**6), 60.0))
        await asyncio.sleep(0.02)
        drawing.cancel()
        (sample,) = await server.generate((2, 4), sampling(3), 10.0)
        assert len(sample.tokens) == 3

    served(body, Lengths(10**6, 10**6), limit=1)


def test_a_server_without_weights_refuses() -> None:
    async def run() -> None:
        replica = Replica(cast(Server, ((SimpleNamespace(), None, None),)), 1, 0.0, Lengths(1, 1), FILLER)
        server = EmulatedServer(replica, Pace(Emulation(), "replica"))
        with pytest.raises(HetrlError, match="before the first weight version"):
            await server.generate((2,), sampling(1), 1.0)

    asyncio.run(run())


@pytest.mark.parametrize(("response", "texts"), [(100, 10), (95, 10), (91, 10), (90, 9)])
def test_a_token_that_counts_as_ten_takes_the_time_of_ten(response: int, texts: int) -> None:
    took = []

    async def body(server: EmulatedServer, prompt: int, expected: int, most: int) -> None:
        began = asyncio.get_running_loop().time()
        (sample,) = await server.generate((2,) * prompt, sampling(most), 10.0)
        took.append(asyncio.get_running_loop().time() - began)
        assert sample.tokens == (FILLER,) * (expected - 1) + (STOP,)
        assert sample.versions == (wire.VersionSpan(1, 0, expected),)

    served(lambda server: body(server, 20, response, 200), Lengths(response, response))
    served(lambda server: body(server, 2, texts, 20), Lengths(response, response), tokens_each=10)
    assert took[1] == pytest.approx(took[0])


def test_a_text_of_tokens_that_count_as_ten_goes_on_where_another_server_began_it() -> None:
    async def body(server: EmulatedServer) -> None:
        (first,) = await server.generate((2, 3), sampling(4), 10.0)
        assert (first.tokens, first.finish_reason) == ((FILLER,) * 4, "length")
        (rest,) = await server.generate((2, 3, *first.tokens), sampling(16), 10.0)
        assert (len(rest.tokens), rest.finish_reason) == (6, "stop")

    served(body, Lengths(95, 95), tokens_each=10)
