"""A clock that can be stopped."""

from __future__ import annotations

import math
from collections.abc import Callable


class Stopwatch:
    """Counts the seconds of a clock but for those between `stop` and `go_on`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Go on from what the clock says."""
        self._clock = clock
        self._stood, self._stands_since = 0.0, math.inf  # seconds that do not count, and since when it stands, if so

    @property
    def seconds(self) -> float:
        """Return what it shows."""
        return min(self._clock(), self._stands_since) - self._stood

    def stop(self) -> None:
        """Stand still, or go on doing so."""
        self._stands_since = min(self._stands_since, self._clock())

    def go_on(self) -> None:
        """Go on where it stands, or as it does."""
        self._stood, self._stands_since = self._clock() - self.seconds, math.inf
