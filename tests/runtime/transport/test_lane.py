from __future__ import annotations

import asyncio

from hetrl.runtime import wire
from hetrl.runtime.transport.lane import Attempt, Lane, Parcel, parcel_for
from hetrl.runtime.wire import Priority


def _parcel(priority: Priority, number: int = 0, size_bytes: int = 10) -> Parcel:
    header = wire.Header(run="r", source="alpha/a/0", to=("beta/b/0",), id=number, priority=priority)
    return Parcel(header, [], header.to, size_bytes)


class _Wire:
    """Takes parcels while it is open."""

    def __init__(self) -> None:
        self.sent: list[Priority] = []
        self.open = False

    def attempt(self, parcel: Parcel) -> Attempt:
        if not self.open:
            return Attempt.BUSY
        self.sent.append(parcel.header.priority)
        return Attempt.SENT


def test_control_goes_first_and_weights_are_not_starved() -> None:
    async def scenario() -> None:
        wire_ = _Wire()
        lane = Lane(wire_.attempt)
        for number in range(40):
            for priority in (Priority.WEIGHTS, Priority.DATA):
                assert lane.offer(_parcel(priority, number))
        for _ in range(3):
            lane.offer(_parcel(Priority.CONTROL))
        wire_.open = True
        assert lane.pump() is Attempt.SENT
        assert wire_.sent[:3] == [Priority.CONTROL] * 3
        first = wire_.sent[3:27]
        assert first.count(Priority.WEIGHTS) == 3
        assert first.count(Priority.DATA) == 21
        assert len(wire_.sent) == 83

    asyncio.run(scenario())


def test_weights_that_give_way_go_behind_others_and_are_not_starved() -> None:
    async def scenario() -> None:
        wire_ = _Wire()
        lane = Lane(wire_.attempt)
        for number in range(100):
            for priority in (Priority.BACKGROUND, Priority.LATER_WEIGHTS, Priority.WEIGHTS, Priority.DATA):
                assert lane.offer(_parcel(priority, number))
        wire_.open = True
        assert lane.pump() is Attempt.SENT
        both = [one for one in wire_.sent if one in (Priority.WEIGHTS, Priority.LATER_WEIGHTS)]
        ahead = both[: both.index(Priority.WEIGHTS, both.index(Priority.LATER_WEIGHTS) + 1)]
        assert Priority.LATER_WEIGHTS in ahead, "while other weights wait"
        assert both[:80].count(Priority.LATER_WEIGHTS) <= 10
        assert wire_.sent[-100:] == [Priority.BACKGROUND] * 100

    asyncio.run(scenario())


def test_a_full_lane_takes_nothing_more_and_counts_what_it_holds() -> None:
    async def scenario() -> None:
        lane = Lane(_Wire().attempt, limit_bytes=25)
        assert [lane.offer(_parcel(Priority.DATA)) for _ in range(4)] == [True, True, False, False]
        assert lane.bytes == 20
        assert len(lane.clear()) == 2
        assert (lane.bytes, lane.peak_bytes) == (0, 20)
        assert lane.offer(_parcel(Priority.DATA))

    asyncio.run(scenario())


def test_a_parcel_names_those_alone_to_whom_it_goes_each_with_its_place() -> None:
    to = ("beta/b/0", "gamma/b/1", "beta/b/2")
    places = {name: wire.Place(stream=1, sequence=sequence) for sequence, name in enumerate(to)}
    header = wire.Header(run="r", source="alpha/a/0", to=to, id=1, places=tuple(places.values()), sizes=(3,))
    frames = [wire.encode_struct(header), b"abc"]
    part = parcel_for(header, places, frames, ("beta/b/2", "beta/b/0"))
    heard = wire.decode_header(part.frames[0])
    assert (heard.to, [place.sequence for place in heard.places]) == (("beta/b/2", "beta/b/0"), [2, 0])
    assert (heard.id, heard.sizes, part.frames[1], part.header) == (1, (3,), b"abc", heard)
    assert part.bytes == len(part.frames[0]) + 3
    assert parcel_for(header, places, frames, to).frames is frames
    plain = wire.Header(run="r", source="alpha/a/0", to=to, id=1)
    heard = wire.decode_header(parcel_for(plain, {}, frames, to[:1]).frames[0])
    assert (heard.to, heard.places) == (to[:1], ())
