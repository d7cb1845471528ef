from __future__ import annotations

import asyncio

import pytest

from hetrl.runtime.transport.links import Links

BETA = "beta/actor_generation/0"


async def _every(seconds: float, links: Links) -> None:
    while True:
        await asyncio.sleep(seconds)
        links.restored("beta")


def test_a_stream_that_is_lost_now_and_then_stops_no_clock() -> None:
    async def run() -> None:
        links = Links()
        flaps = asyncio.create_task(_every(0.05, links))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20), links.timeout((BETA,), 0.3):
                await asyncio.sleep(60)
        flaps.cancel()

    asyncio.run(run())


def test_a_clock_begins_anew_once_a_link_that_was_out_is_back() -> None:
    async def run() -> float:
        links, loop = Links(), asyncio.get_running_loop()
        links.lost("beta")
        loop.call_later(0.2, links.restored, "beta")
        loop.call_later(0.3, links.restored, "beta")
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with links.timeout((BETA,), 0.2):
                await asyncio.sleep(60)
        return loop.time() - began

    assert asyncio.run(run()) >= 0.4


def test_a_link_that_is_given_up_or_out_is_neither_once_the_gateway_is_another_one() -> None:
    links, told = Links(), list[str]()
    links.lost("beta")
    links.give_up("gamma", "out for long")
    with links.told(told.append):
        links.forget()
    assert sorted(told) == ["beta", "gamma"]
    assert not links.are_out(BETA) and links.why_given_up("gamma/keeper/0") is None
