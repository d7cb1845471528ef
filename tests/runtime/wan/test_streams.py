from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.wan.streams import PIECE_BYTES, Arrivals, Inbox, Key, Outbox, cuts, kept_bytes, piece_bytes

_SOURCE, _OTHER = "beta/actor_training.rank/0", "gamma/actor_training.rank/0"


def _key(sequence: int = 0, group: str = "g") -> Key:
    return Key(group, "all_reduce", sequence)


def _piece(key: Key, number: int, size_bytes: int, dtype: str = "uint8") -> wire.WanPiece:
    return wire.WanPiece(
        group=key.group,
        operation=key.operation,
        sequence=key.sequence,
        tag=key.tag,
        number=number,
        size_bytes=size_bytes,
        dtype=dtype,
    )


@given(st.integers(0, 100), st.integers(1, 40))
def test_cuts_cover_everything_once(size_bytes: int, piece_bytes: int) -> None:
    parts = cuts(size_bytes, piece_bytes)
    assert [at for part in parts for at in range(part.start, part.stop)] == list(range(size_bytes))
    assert all(0 < part.stop - part.start <= piece_bytes for part in parts)


@given(st.data())
def test_pieces_land_whether_they_come_before_or_after_the_operation(data: st.DataObject) -> None:
    contents = [data.draw(st.binary(min_size=1, max_size=20)) for _ in range(3)]
    parts = [cuts(len(content), 4) for content in contents]
    pieces = [(stream, number) for stream in range(3) for number in range(len(parts[stream]))]
    begins = [(stream, None) for stream in range(3)]

    async def scenario() -> None:
        inbox, places, arrivals = Inbox(), [bytearray(len(content)) for content in contents], {}
        for stream, number in data.draw(st.permutations(pieces + begins)):
            key = _key(stream)
            if number is None:
                arrivals[stream] = Arrivals(key, _SOURCE, memoryview(places[stream]), parts[stream], "uint8")
                inbox.begin(arrivals[stream])
            else:
                buffer = memoryview(contents[stream])[parts[stream][number]]
                inbox.take(_SOURCE, _piece(key, number, len(contents[stream])), buffer)
        for stream in range(3):
            await arrivals[stream].all()
            inbox.end(arrivals[stream])
        assert [bytes(place) for place in places] == contents
        assert inbox.early_bytes() == 0
        assert not inbox.awaited("g")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("size_bytes", "dtype", "buffer"), [(9, "uint8", b"12345678"), (8, "int8", b"12345678"), (8, "uint8", b"1234567")]
)
def test_what_does_not_fit_is_an_error_that_names_the_source(size_bytes: int, dtype: str, buffer: bytes) -> None:
    async def scenario() -> None:
        arrivals = Arrivals(_key(), _SOURCE, memoryview(bytearray(8)), cuts(8), "uint8")
        arrivals.land(_piece(_key(), 0, size_bytes, dtype), memoryview(buffer))
        with pytest.raises(HetrlError, match=f"all_reduce 0: {_SOURCE} "):
            await arrivals.all()

    asyncio.run(scenario())


def test_who_is_waited_for_is_known_until_the_piece_lands() -> None:
    async def scenario() -> None:
        inbox = Inbox()
        arrivals = Arrivals(_key(), _SOURCE, memoryview(bytearray(1)), cuts(1), "uint8")
        inbox.begin(arrivals)
        assert not inbox.awaited("g")
        waiting = asyncio.create_task(arrivals.piece(0))
        await asyncio.sleep(0)
        assert inbox.awaited("g") == {_SOURCE}
        assert not inbox.awaited("other")
        inbox.take(_SOURCE, _piece(_key(), 0, 1), memoryview(b"x"))
        await waiting
        assert not inbox.awaited("g")

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.sampled_from(["send", "ready"]), st.integers(0, 3), st.integers(1, 6)), max_size=60))
def test_no_receiver_gets_more_ahead_than_the_limit(events: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        outbox, ahead, ready = Outbox(limit_bytes=10), dict.fromkeys(range(4), 0), set()
        for event, sequence, size_bytes in events:
            if event == "ready" and sequence not in ready:
                outbox.ready(_SOURCE, _key(sequence))
                ready.add(sequence)
                ahead[sequence] = 0
            elif event == "send" and not outbox.blockers((_SOURCE,), _key(sequence), size_bytes):
                await outbox.admit((_SOURCE,), _key(sequence), size_bytes)
                if sequence not in ready:
                    ahead[sequence] += size_bytes
            assert sum(ahead.values()) <= 10
        # Whatever was refused may go once its receiver has begun.
        for sequence in set(range(4)) - ready:
            outbox.ready(_SOURCE, _key(sequence))
        assert not outbox.blockers((_SOURCE,), _key(9), 10)

    asyncio.run(scenario())


def test_a_stream_that_sent_nothing_leaves_nothing() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        outbox.end((_SOURCE,), _key(0))
        await outbox.admit((_SOURCE,), _key(1), 8)
        outbox.end((_SOURCE,), _key(1))
        outbox.ready(_SOURCE, _key(1))
        assert not outbox._ended
        assert not outbox._ready

    asyncio.run(scenario())


def test_a_sender_goes_on_when_the_slowest_receiver_has_begun() -> None:
    async def scenario() -> None:
        outbox = Outbox(limit_bytes=10)
        both = (_SOURCE, _OTHER)
        await outbox.admit(both, _key(), 8)
        waiting = asyncio.create_task(outbox.admit(both, _key(), 8))
        outbox.ready(_SOURCE, _key())
        await asyncio.sleep(0)
        assert outbox.blockers(both, _key(), 8) == [_OTHER]
        assert not waiting.done()
        outbox.ready(_OTHER, _key())
        await waiting

    asyncio.run(scenario())


@pytest.mark.parametrize("size_bytes", [0, 1, 1000, PIECE_BYTES])
def test_all_that_may_go_ahead_is_kept(size_bytes: int) -> None:
    """Of two groups: one that ended at the receiver, and one that has not begun there."""

    async def scenario() -> int:
        inbox, number, buffer = Inbox(), 0, memoryview(bytes(size_bytes))
        for group in ("over", "next"):
            outbox, key = Outbox(), _key(group=group)
            while not outbox.blockers((_SOURCE,), key, kept_bytes(buffer)):
                await outbox.admit((_SOURCE,), key, kept_bytes(buffer))
                inbox.take(_SOURCE, _piece(key, number, size_bytes), buffer)
                number += 1
        return number

    assert asyncio.run(scenario()) > 1


def test_a_group_that_is_over_leaves_nothing() -> None:
    async def scenario() -> None:
        inbox, outbox = Inbox(), Outbox(limit_bytes=10)
        for group in ("g", "other"):
            inbox.take(_SOURCE, _piece(_key(group=group), 0, 3), memoryview(b"abc"))
            await outbox.admit((_SOURCE,), _key(group=group), 5)
        assert inbox.early_bytes() == 6
        inbox.forget("g")
        outbox.forget("g")
        assert inbox.early_bytes() == 3
        assert not outbox.blockers((_SOURCE,), _key(1), 5)
        assert outbox.blockers((_SOURCE,), _key(1), 6)

    asyncio.run(scenario())


@given(st.integers(0, 2**33))
def test_pieces_end_between_elements_and_share_a_small_tensor_among_streams(size_bytes: int) -> None:
    each = piece_bytes(size_bytes)
    assert each % 16 == 0
    assert each <= PIECE_BYTES
    assert each >= 64 * 1024
    assert size_bytes < 4 * 64 * 1024 or -(-size_bytes // each) >= 4
