"""Signs of life: those that a member gives, and those that it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Never

from hetrl.runtime import wire
from hetrl.runtime.transport.exchange import Exchange
from hetrl.runtime.transport.mailbox import RunAborted
from hetrl.runtime.transport.notice import ends_soon
from hetrl.runtime.transport.receiver import Receiver

BEAT_SECONDS = 2.0  # of a rank, whose silence ends a run soonest
_NOTICE_SECONDS = 1.0  # between two questions whether there is a notice that Slurm ends the job
_LISTEN_SECONDS = 1.0


async def beat(
    exchange: Exchange,
    directory: Path | None,
    to: Callable[[], Iterable[str]],
    every_seconds: float,
    doing: Callable[[], str],
) -> Never:
    """Tell whoever `to` names that this member lives, and at once that the job of site `directory` ends."""
    loop = asyncio.get_running_loop()
    told, due = False, loop.time()
    while True:
        ending = directory is not None and ends_soon(directory)
        if ending != told or loop.time() >= due:
            told, due = ending, loop.time() + every_seconds
            for address in to():
                exchange.tell(address, wire.Heartbeat(doing=doing(), ending=ending))
        await asyncio.sleep(min(due - loop.time(), _NOTICE_SECONDS))


async def silence(
    address: str, receiver: Receiver, source: str, within_seconds: float, first_seconds: float
) -> RunAborted:
    """Return, when nothing came of `source` for so long, what ends the member `address`.

    The first word may take longer.
    """
    loop = asyncio.get_running_loop()
    receiver.expect(source)
    began, silent_for = receiver.heard, 0
    while silent_for < 2:  # in a process that stood still, the clock is ahead of what there is to hear
        heard = receiver.heard
        limit_seconds = first_seconds if heard == began else within_seconds
        silent_for = silent_for + 1 if loop.time() - heard > limit_seconds else 0
        await asyncio.sleep(_LISTEN_SECONDS)
    return RunAborted(
        f"{wire.site_of(source)}: no word of {source} for {limit_seconds:g} s (launch.orphan_timeout); so "
        f"{address} ends; `hetrl resume` goes on from the last checkpoint"
    )
