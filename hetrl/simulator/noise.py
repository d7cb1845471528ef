"""How far what engines take, and response lengths, are off from what the cost model says: as in emulated engines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

STRETCH_STEPS = 128  # decode steps at one rate, as `hetrl.runtime.emulated.server` draws it


@dataclass(frozen=True)
class Noise:
    """Each value is off by at most this share of it, by 0 on average; the same seed gives the same draws."""

    share: float = 0.0
    seed: str = ""
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Begin the draws."""
        object.__setattr__(self, "_random", random.Random(self.seed))

    def perturbed(self, value: float) -> float:
        """Return a value that is off."""
        return value * (1 + self._random.uniform(-self.share, self.share)) if self.share else value

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
