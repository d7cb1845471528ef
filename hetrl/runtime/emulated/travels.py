"""The versions of trained models that are on their way from a site, and when each is where it is used.

Whenever one leaves, all that are under way are played event by event from when they left (`play.versions`): what goes
ahead of others, or shares links with them, is known only then. What leaves other sites takes links of its own.
"""

from __future__ import annotations

import asyncio

from hetrl.cost.model import CostModel
from hetrl.plan.plan import Plan
from hetrl.runtime.emulated import play
from hetrl.runtime.emulated.pace import Pace

_THERE_SECONDS = 1e-6  # less is rounding


class Travels:
    """What is under way from one site; seconds and moments are emulated ones."""

    def __init__(self, plan: Plan, model: CostModel) -> None:
        self._plan, self._model = plan, model
        self._left: list[tuple[str, float]] = []  # which model's version left when, since nothing was under way
        self._arrive: list[float] = []  # when they arrive
        self._under_way = 0
        self._changed = asyncio.Event()

    async def travel(self, name: str, pace: Pace) -> None:
        """Wait for as long as a version of this model, which leaves now, is on its way."""
        left, off, number = pace.now, pace.perturbed(1.0), len(self._left)
        self._leave(name, left)
        try:
            while (rest := left + off * (self._arrive[number] - left) - pace.now) > _THERE_SECONDS:
                await self._until_changed(pace.to_wait(pace.now + rest))
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._left.clear()

    def _leave(self, name: str, moment: float) -> None:
        self._under_way += 1
        self._left.append((name, moment))
        first = self._left[0][1]
        leave = [(each, when - first) for each, when in self._left]
        self._arrive = [first + seconds for seconds in play.versions(self._plan, leave, self._model)]
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_changed(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
