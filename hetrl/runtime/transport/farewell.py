"""What a member waits for before it leaves: that its last words arrive, be some of them lost on the way.

Such as the one that lets others out of a barrier, or tells them that the run is finished.
"""

from __future__ import annotations

import asyncio
import logging

from hetrl.runtime.transport.exchange import Exchange
from hetrl.runtime.transport.links import Links

FAREWELL_SECONDS = 60.0  # a gateway that is started again on a busy node takes some tens of them
LONGEST_FAREWELL_SECONDS = 600.0  # be links out: a gateway that is gone does not say that they are back
LAST_WORD_SECONDS = 0.5  # of who ends for a cause: whoever is to hear it may be dead
_LOOK_SECONDS = 0.005

_log = logging.getLogger(__name__)


async def farewell(exchange: Exchange, links: Links, whole: bool) -> None:
    """Wait until all that was sent has arrived or never will.

    For `FAREWELL_SECONDS` in which no link there is out, and for `LONGEST_FAREWELL_SECONDS` in all; where the member
    does not leave as it should (`whole`) but ends for a cause, for `LAST_WORD_SECONDS`.
    """
    exchange.settle()
    exchange.hurry()
    receivers, seconds = (exchange.unacknowledged, FAREWELL_SECONDS) if whole else (set[str](), LAST_WORD_SECONDS)
    try:
        async with asyncio.timeout(LONGEST_FAREWELL_SECONDS), links.timeout(receivers, seconds):
            while exchange.unacknowledged:
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        if whole:
            deaf = ", ".join(sorted(exchange.unacknowledged))
            _log.warning("%s leaves; what it said last was not acknowledged by %s", exchange.address, deaf)
