"""The versions of trained models that are on their way from a site, and when each is where it is used.

Whenever one leaves, all that are under way are played event by event from when they left (`play.versions`): what goes
ahead of others, or shares links with them, is known only then. What leaves other sites takes links of its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hetrl.cost.model import CostModel
from hetrl.plan.plan import Plan
from hetrl.runtime.emulated import play
from hetrl.runtime.emulated.pace import Pace

_THERE_SECONDS = 1e-6  # less is rounding


@dataclass(eq=False)
class _Version:
    """One that left, at an emulated moment; when it arrives as it is played, and when it was there."""

    name: str
    left: float
    arrives: float = 0.0
    there: float | None = None


class Travels:
    """What is under way from one site; seconds and moments are emulated ones."""

    def __init__(self, plan: Plan, model: CostModel) -> None:
        self._plan, self._model = plan, model
        self._versions: list[_Version] = []  # under way, and what was while these were; in the order in which they left
        self._changed = asyncio.Event()

    async def travel(self, name: str, pace: Pace) -> None:
        """Wait for as long as a version of this model, which leaves now, is on its way."""
        version, off = _Version(name, pace.now), pace.perturbed(1.0)
        self._leave(version)
        try:
            while (rest := version.left + off * (version.arrives - version.left) - pace.now) > _THERE_SECONDS:
                await self._until_changed(pace.to_wait(pace.now + rest))
        finally:
            version.there = pace.now

    def _leave(self, version: _Version) -> None:
        since = min((one.left for one in self._versions if one.there is None), default=version.left)
        self._versions = [one for one in self._versions if one.there is None or one.there > since] + [version]
        first = self._versions[0].left
        leave = [(one.name, one.left - first) for one in self._versions]
        for one, seconds in zip(self._versions, play.versions(self._plan, leave, self._model), strict=True):
            one.arrives = first + seconds
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_changed(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass
