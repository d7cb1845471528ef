"""Works that go on beside each other until one of them has ended, or has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def first_to_end(*works: Awaitable[None]) -> None:
    """Run all side by side; end with the first, or with its error. The others are cancelled by then."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def beside(work: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> None:
    """Do a work while others go on; end with it, or with what any of them raises. The others are cancelled by then."""
    works = Works()
    for other in others:
        works.begin(other)
    try:
        await works.result(works.begin(work))
    finally:
        await works.end()


class Works:
    """Works that begin while others go on; who waits for one of them hears at once where any fails. Made in a loop."""

    def __init__(self) -> None:
        """Begin with none."""
        self._under_way = set[asyncio.Future[Any]]()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # what the first one raised

    def begin(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Future[_Result]:
        """Let work go on beside the rest, until it ends or all do."""
        begun = asyncio.ensure_future(work)
        self._under_way.add(begun)
        begun.add_done_callback(self._ended)
        return begun

    def _ended(self, work: asyncio.Future[Any]) -> None:
        self._under_way.discard(work)
        if not work.cancelled() and (error := work.exception()) and not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # asyncio would log what nobody asks for

    async def result(self, work: asyncio.Future[_Result]) -> _Result:
        """Return what work does; raise what it, or any that goes on beside it, raises, as soon as it does."""
        watched: list[asyncio.Future[Any]] = [work, self._failure]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            self._failure.result()
        return work.result()

    async def end(self) -> None:
        """Cancel all that goes on, and wait until it has ended."""
        left = [*self._under_way]
        for work in left:
            work.cancel()
        await asyncio.gather(*left, return_exceptions=True)
