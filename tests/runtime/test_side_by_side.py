from __future__ import annotations

import asyncio

import pytest

from hetrl.runtime.side_by_side import beside


class Watched:
    """A work that goes on until it is cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    async def go_on(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


async def _end_later(error: Exception | None = None) -> None:
    await asyncio.sleep(0)
    if error:
        raise error


def test_what_goes_on_beside_a_work_ends_with_it() -> None:
    other = Watched()
    asyncio.run(beside(_end_later(), other.go_on()))
    assert other.cancelled


def test_a_work_goes_on_where_one_beside_it_has_nothing_more_to_do() -> None:
    async def work(ended: asyncio.Event) -> None:
        await ended.wait()
        await asyncio.sleep(0.01)

    async def run() -> bool:
        ended = asyncio.Event()

        async def other() -> None:
            ended.set()

        await beside(work(ended), other())
        return ended.is_set()

    assert asyncio.run(run())


def test_a_work_ends_with_the_error_of_one_beside_it() -> None:
    work, third = Watched(), Watched()
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(beside(work.go_on(), third.go_on(), _end_later(OSError("disk full"))))
    assert work.cancelled and third.cancelled
