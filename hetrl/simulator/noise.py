"""How far what engines take, and response lengths, are off from what the cost model says: as in emulated engines."""

from __future__ import annotations

import random
from dataclasses import dataclass

STRETCH_STEPS = 128  # at most so many decode steps at one rate: contexts grow meanwhile


class Noise:
    """Each value is off by at most this share of it, by 0 on average; the same seed gives the same draws."""

    def __init__(self, share: float = 0.0, seed: str = "") -> None:
        """Begin the draws."""
        self._share, self.random = share, random.Random(seed)

    def perturbed(self, value: float, parts: int = 1) -> float:
        """Return a value of which each of so many equal parts is off."""
        off = sum(self.random.uniform(-self._share, self._share) for _ in range(parts))
        return value * (1 + off / parts)

    def length(self, tokens: int, most: int) -> int:
        """Return a response length that is off, of 1 to `most` tokens."""
        return min(max(round(self.perturbed(tokens)), 1), most)


@dataclass(eq=False)
class Rate:
    """The rate of one replica's decoding, off anew for each stretch of steps and whenever the batch changes."""

    noise: Noise
    _factor: float = 1.0
    _steps: int = STRETCH_STEPS
    _batch: int = 0

    def seconds(self, steps: int, batch: int, each: float) -> float:
        """Return how long so many steps of `each` seconds take with a batch of so many."""
        if self._steps >= STRETCH_STEPS or batch != self._batch:
            self._factor, self._steps, self._batch = self.noise.perturbed(1.0), 0, batch
        self._steps += steps
        return self._factor * steps * each
