"""Works that go on beside each other until one of them has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


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
