"""The clock that emulated engines wait by, and how far what they wait is off from what the cost model says."""

from __future__ import annotations

import asyncio

from hetrl.describe.launching import Emulation
from hetrl.simulator.noise import Noise


class Pace(Noise):
    """Lets `emulation.speed` seconds pass in one of this machine's; draws of one `name` repeat with the seed."""

    def __init__(self, emulation: Emulation, name: str) -> None:
        super().__init__(emulation.noise, f"{emulation.seed}/{name}")
        self._speed = emulation.speed

    @property
    def now(self) -> float:
        """Return the emulated seconds of this process's clock."""
        return asyncio.get_running_loop().time() * self._speed

    async def until(self, moment: float) -> None:
        """Wait for an emulated moment; one that is over is not waited for."""
        await asyncio.sleep(self.to_wait(moment))

    def to_wait(self, moment: float) -> float:
        """Return the seconds of this machine until an emulated moment."""
        return max(0.0, (moment - self.now) / self._speed)
