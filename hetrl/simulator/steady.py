"""When a play has shown enough, and which of its iterations count.

    iterations come in windows of 1 + max_staleness, in which versions may come in bursts, or of the cycle in which they
            repeat; the first half is left out
    steady: the mean of a window is known within `PRECISION`, and neither does generation live on what the start has
            left over nor does the critic fall further behind

Source: batch means (Law, Simulation Modeling and Analysis, section 9.5.3) and Student's distribution (Abramowitz and
Stegun, 26.7.5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, mean, stdev

PRECISION = 0.03  # relative half width of the interval that holds the mean of a window with a probability of
CONFIDENCE = 0.95
FEWEST = 3  # windows: two may be alike by chance
SAME = 1e-3  # relative difference up to which two iterations took as long: rounds of tokens are whole
WORKS = 0.1  # by how much the work of generation may differ between the halves of what counts
MOST_ITERATIONS = 200  # with very unequal responses few prompts are never known so well


@dataclass
class Versions:
    """What is known when versions were served, the start included: each list has an entry for each.

    `times` in seconds; `busy` how long each rollout replica has worked until then, `late` by how many versions the
    critic was behind.
    """

    window: int
    times: list[float] = field(default_factory=list)
    busy: list[Sequence[float]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Return how many iterations have ended."""
        return len(self.times) - 1

    @property
    def cycle(self) -> int:
        """Return after how many iterations they repeat, each as long as before; 0: they do not, or in whole windows.

        Where all responses are of one length nothing is left to chance, yet a batch may meet the others each time
        elsewhere, until they come round.
        """
        seconds = [after - before for before, after in pairwise(self.times)]
        for length in range(1, self.done // FEWEST + 1):
            last = seconds[-FEWEST * length :]
            if all(math.isclose(one, other, rel_tol=SAME) for one, other in zip(last, last[length:], strict=False)):
                return length if self.window % length else 0
        return 0

    @property
    def counted(self) -> int:
        """Return how many of the last iterations count: whole windows of the second half, or what there is."""
        if cycle := self.cycle:
            return max(self.done // 2 // cycle, FEWEST) * cycle
        windows = self.done // 2 // self.window
        return windows * self.window if windows else max(self.done - 1, 1)

    @property
    def iteration_seconds(self) -> float:
        """Return the mean seconds of the iterations that count."""
        return (self.times[-1] - self.times[-1 - self.counted]) / self.counted

    @property
    def busiest_seconds(self) -> float:
        """Return how long the busiest replica works in an iteration."""
        pairs = zip(self.busy[-1], self.busy[-1 - self.counted], strict=True)
        return max(after - before for after, before in pairs) / self.counted

    def is_steady(self, builds_up: bool) -> bool:
        """Whether the mean is known and lasts; `builds_up`: generation runs ahead of trainings, as in mode async."""
        count, window = self.counted, self.cycle or self.window
        if count < FEWEST * window:
            return False
        ends = [self.times[-1 - start] for start in range(0, count + 1, window)]
        seconds = [after - before for after, before in pairwise(ends)]
        known = half_width(seconds) <= PRECISION * mean(seconds)
        half = count // window // 2 * window
        last, before = (self._work(start, half) for start in (0, half))
        alike = not builds_up or abs(last - before) <= WORKS * last
        return known and alike and self.late[-1] == self.late[-1 - count]

    def _work(self, start: int, count: int) -> float:
        """Return how long all replicas worked in so many iterations, `start` iterations ago."""
        pairs = zip(self.busy[-1 - start], self.busy[-1 - start - count], strict=True)
        return sum(after - before for after, before in pairs)


def half_width(values: Sequence[float]) -> float:
    """Return the half width of the interval that holds the mean of such values with `CONFIDENCE`; at least two."""
    freedom, z = len(values) - 1, NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return student * stdev(values) / math.sqrt(len(values))
