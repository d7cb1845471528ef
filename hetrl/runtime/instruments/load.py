"""Round trips and full load on any way: whoever asks says how one message is sent and answered.

    round trips    one small message after the other
    full load      double the bytes under way while that brings more, then keep them there and count what is answered

Bytes under way are what a fast and distant link needs, and too many of them only queue; so their number is found.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hetrl.errors import HetrlError

WARM_UP_ROUND_TRIPS = 2  # connections, windows and caches open
INTERVALS = 10
LEAST_RAMP_SECONDS, RAMP_ROUND_TRIPS = 0.2, 4
GAIN = 1.15  # below it, more bytes under way bring no more
FIRST_WINDOW_BYTES, LARGEST_WINDOW_BYTES = 2**20, 48 * 2**20  # a member takes 64 MiB under way per receiver
MESSAGES_UNDER_WAY = 16
LEAST_MESSAGE_BYTES, LARGEST_MESSAGE_BYTES = 2**16, 2**20

Send = Callable[[bytes], Awaitable[None]]  # returns when the message is answered


@dataclass(frozen=True)
class Load:
    """Bytes that were answered in each interval, and how many were kept under way."""

    interval_seconds: float
    interval_bytes: tuple[int, ...]
    window_bytes: int


def gbps_of(interval_bytes: Sequence[int], interval_seconds: float) -> tuple[float, ...]:
    """Return the rate in each interval of a load."""
    return tuple(size_bytes * 8 / interval_seconds / 1e9 for size_bytes in interval_bytes)


async def round_trips(send: Callable[[], Awaitable[None]], count: int) -> tuple[float, ...]:
    """Return the seconds of so many round trips of a small message, after some that do not count."""
    seconds = []
    for _ in range(WARM_UP_ROUND_TRIPS + count):
        began = time.perf_counter()
        await send()
        seconds.append(time.perf_counter() - began)
    return tuple(seconds[WARM_UP_ROUND_TRIPS:])


async def full_load(send: Send, seconds: float, trips: tuple[float, ...]) -> Load:
    """Return what a way carries for so many seconds; `trips` are its round trips, in seconds.

    Raises HetrlError where that was too short for a single answer, and that of a message that was not answered.
    """
    round_trip_seconds = sorted(trips)[len(trips) // 2]
    window_bytes = await _find_window(send, max(LEAST_RAMP_SECONDS, RAMP_ROUND_TRIPS * round_trip_seconds))
    # What is answered in the first round trip left before the way was full.
    began, answers = await _flood(send, seconds + round_trip_seconds, window_bytes)
    began += round_trip_seconds
    interval_seconds = seconds / INTERVALS
    counts = [0] * INTERVALS
    for when, size_bytes in answers:
        interval = int((when - began) // interval_seconds)
        if 0 <= interval < INTERVALS:
            counts[interval] += size_bytes
    if not any(counts):
        raise HetrlError(f"nothing was answered in the {seconds:g} s of the load; measure for longer (--seconds)")
    return Load(interval_seconds, tuple(counts), window_bytes)


async def _find_window(send: Send, ramp_seconds: float) -> int:
    """Return the bytes under way beyond which the rate rises no more."""
    window_bytes, best = FIRST_WINDOW_BYTES, 0.0
    while True:
        began, answers = await _flood(send, ramp_seconds, window_bytes)
        rate = sum(size for _, size in answers) / (answers[-1][0] - began)
        if rate < GAIN * best or 2 * window_bytes > LARGEST_WINDOW_BYTES:
            return window_bytes
        best, window_bytes = max(best, rate), 2 * window_bytes


async def _flood(send: Send, seconds: float, window_bytes: int) -> tuple[float, list[tuple[float, int]]]:
    """Keep so many bytes under way for a while; return when it began, and each answer's time and bytes.

    Raises the HetrlError of the first message that was not answered.
    """
    size_bytes = min(max(window_bytes // MESSAGES_UNDER_WAY, LEAST_MESSAGE_BYTES), LARGEST_MESSAGE_BYTES)
    payload, answers = bytes(size_bytes), list[tuple[float, int]]()
    began = time.perf_counter()

    async def keep_sending() -> None:
        while True:  # once at least: a busy machine may hold this process up for longer than all of a ramp
            await send(payload)
            answers.append((time.perf_counter(), size_bytes))
            if answers[-1][0] >= began + seconds:
                return

    try:
        async with asyncio.TaskGroup() as senders:
            for _ in range(max(1, window_bytes // size_bytes)):
                senders.create_task(keep_sending())
    except ExceptionGroup as group:  # `except*` would wrap what it raises up to Python 3.11.3
        unanswered, others = group.split(HetrlError)
        raise (group if unanswered is None or others else unanswered.exceptions[0]) from None
    return began, answers
