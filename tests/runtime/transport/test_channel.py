"""What the two ends of a channel make of a peer that says what cannot be."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hetrl.runtime.transport.channel import MOST_EARLY, MOST_OPEN, MOST_WAITING, Inbound, Outbound
from hetrl.runtime.transport.chunks import Chunk
from hetrl.runtime.wire import Acknowledged, Place, Priority

WINDOW_BYTES = 2**20
REPORT = Acknowledged(
    priority=Priority.CONTROL, incarnation=1, stream=1, cumulative=2, ranges=((3, 5), (7, 8)), taken_bytes=40, answers=0
)


def chunk(message: int, size: int = 10) -> Chunk:
    return Chunk(message, None, (size,), (memoryview(bytes(size)),))


def sender(chunks: int) -> Outbound:
    """One that has sent so many chunks, of a message each."""
    channel = Outbound(Priority.CONTROL, WINDOW_BYTES)
    for number in range(chunks):
        channel.reserve(10, 0.0)
        channel.add(chunk(number), 0.0)
    return channel


def test_what_arrived_is_let_go() -> None:
    channel = sender(9)
    channel.acknowledge(REPORT, 1.0)
    assert [number for number in range(9) if channel.holds(number)] == [2, 5, 6, 8]
    channel.acknowledge(replace(REPORT, cumulative=9, ranges=(), taken_bytes=90), 1.0)
    assert not channel.unacknowledged


def test_an_honest_sender_begins_no_more_small_messages_than_may_wait() -> None:
    channel = Outbound(Priority.CONTROL, WINDOW_BYTES)
    begun = 0
    while channel.has_room(1):
        channel.reserve(1, 0.0)
        channel.add(chunk(begun, 1), 0.0)
        begun += 1
    assert begun == MOST_OPEN < MOST_WAITING and channel.open_bytes < WINDOW_BYTES
    report = replace(REPORT, cumulative=begun, ranges=(), taken_bytes=3)
    channel.acknowledge(report, 1.0)
    assert channel.has_room(1)
    for _ in range(3):
        channel.reserve(1, 2.0)
    assert not channel.has_room(1)


@pytest.mark.parametrize(
    "lie",
    [
        {"cumulative": -(2**62), "ranges": ((-(2**62), 0),)},
        {"ranges": ((3, 5), (3, 5))},
        {"ranges": ((3, 5), (4, 6))},
        {"ranges": ((7, 8), (3, 5))},
        {"ranges": ((1, 3),)},
        {"ranges": ((4, 4),)},
        {"ranges": tuple((3 + 2 * one, 4 + 2 * one) for one in range(65))},
        {"ranges": ((3, 10),)},
        {"cumulative": 10, "ranges": ()},
        {"taken_bytes": 91},
        {"taken_bytes": -1},
    ],
)
def test_a_report_that_no_receiver_makes_is_refused_and_changes_nothing(lie: dict[str, object]) -> None:
    channel = sender(9)
    with pytest.raises(ValueError, match="acknowledged"):
        channel.acknowledge(replace(REPORT, **lie), 1.0)
    assert all(channel.holds(number) for number in range(9))


def test_chunks_of_no_bytes_that_come_early_are_not_kept_without_limit() -> None:
    channel = Inbound(Priority.CONTROL, 1, WINDOW_BYTES)
    for sequence in range(1, MOST_EARLY + 100):
        assert channel.accept(Place(stream=1, sequence=sequence), chunk(sequence, 0)) == []
    assert channel.report().ranges == ((1, MOST_EARLY + 1),)
    assert len(channel.accept(Place(stream=1, sequence=0), chunk(0))) == MOST_EARLY + 1  # the missing one always fits
