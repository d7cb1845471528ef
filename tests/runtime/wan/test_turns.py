"""In which order the collectives of a group are in which half."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given, strategies as st

from hetrl.runtime.wan.communicator import Operation, Turns
from hetrl.runtime.wan.streams import Key


def operation(number: int, halves: bool) -> Operation:
    return Operation(Key("group", "operation", number), 60.0, f"operation {number}", halves)


async def events_of(all_halves: Sequence[bool], pauses: Sequence[int]) -> list[tuple[int, str]]:
    """Run operations that were called in this order; each half takes so many turns of the loop."""
    turns, events = Turns(), []
    pause = iter(pauses)

    async def run(number: int, halves: bool) -> None:
        async with turns.turn(operation(number, halves)) as begun:
            for half in ("first", "second"):
                if half == "second":
                    await begun.second_half()
                events.append((number, f"{half} begins"))
                for _ in range(next(pause)):
                    await asyncio.sleep(0)
                events.append((number, f"{half} ends"))

    await asyncio.gather(*(run(number, halves) for number, halves in enumerate(all_halves)))
    return events


CALLS = st.lists(st.booleans(), min_size=1, max_size=6).flatmap(
    lambda halves: st.tuples(
        st.just(halves), st.lists(st.integers(0, 4), min_size=2 * len(halves), max_size=2 * len(halves))
    )
)


@given(CALLS)
def test_each_half_is_of_one_at_a_time_in_the_order_of_the_calls(calls: tuple[list[bool], list[int]]) -> None:
    events = asyncio.run(events_of(*calls))
    for half in ("first", "second"):
        own = [(number, what.split()[1]) for number, what in events if what.startswith(half)]
        assert own == [(number, what) for number in range(len(calls[0])) for what in ("begins", "ends")]


@given(CALLS)
def test_one_without_halves_is_alone(calls: tuple[list[bool], list[int]]) -> None:
    events = asyncio.run(events_of(*calls))
    for number in [number for number, halves in enumerate(calls[0]) if not halves]:
        at = events.index((number, "first begins"))
        assert {one for one, _ in events[at : at + 4]} == {number}


def test_the_next_one_begins_while_this_one_ends() -> None:
    events = asyncio.run(events_of([True, True], [0, 9, 0, 0]))
    assert events.index((1, "first ends")) < events.index((0, "second ends")) < events.index((1, "second begins"))


def test_one_that_fails_in_either_half_gives_up_its_turn() -> None:
    async def scenario() -> None:
        turns = Turns()
        for number, late in enumerate([False, True, False]):
            try:
                async with turns.turn(operation(number, halves=True)) as begun:
                    if late:
                        await begun.second_half()
                    raise RuntimeError
            except RuntimeError:
                continue
        async with asyncio.timeout(5), turns.turn(operation(3, halves=False)):
            pass

    asyncio.run(scenario())


def test_one_that_is_cancelled_while_it_waits_for_its_second_half_gives_up_its_first() -> None:
    async def scenario() -> None:
        turns = Turns()

        async def wait() -> None:
            async with turns.turn(operation(1, halves=True)) as begun:
                await begun.second_half()

        async with turns.turn(operation(0, halves=True)) as begun:
            await begun.second_half()
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(5), turns.turn(operation(2, halves=False)):
            pass

    asyncio.run(scenario())
