"""The clock that emulated engines wait by, and how far what they wait is off from what the cost model says."""

from __future__ import annotations

import asyncio
import random

from hetrl.describe.launching import Emulation


class Pace:
    """Lets `emulation.speed` seconds pass in one of this machine's; draws of one `name` repeat with the seed."""

    def __init__(self, emulation: Emulation, name: str) -> None:
        self._speed, self._noise = emulation.speed, emulation.noise
        self.random = random.Random(f"{emulation.seed}/{name}")

    @property
    def now(self) -> float:
        """Return the emulated seconds of this process's clock."""
        return asyncio.get_running_loop().time() * self._speed

    def perturbed(self, value: float, parts: int = 1) -> float:
        """Return a value of which each of so many equal parts is off by at most the share `noise`, by 0 on average."""
        off = sum(self.random.uniform(-self._noise, self._noise) for _ in range(parts))
        return value * (1 + off / parts)

    async def until(self, moment: float) -> None:
        """Wait for an emulated moment; one that is over is not waited for."""
        await asyncio.sleep(self.to_wait(moment))

    def to_wait(self, moment: float) -> float:
        """Return the seconds of this machine until an emulated moment."""
        return max(0.0, (moment - self.now) / self._speed)
