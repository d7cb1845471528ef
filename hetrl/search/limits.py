"""What every search is asked and tells: when to stop, how far it is, the best that it met."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hetrl.search.core.encoding import Vector
from hetrl.search.core.workspace import INFEASIBLE, UNFIT
from hetrl.search.evaluate import Evaluator

AT_ONCE = 2000  # children between two looks at the clock: some hundredths of a second
SEEDS_APART = 1 << 32  # more than a run draws plans, or anybody counts seeds up to: no two share one


@dataclass(frozen=True)
class Progress:
    """How far a search is: seconds of an iteration of the best plan (infinite: none yet), plans valued, arms alive."""

    seconds: float
    evaluations: int
    arms: int


@dataclass
class Limits:
    """When to stop: at a time of the monotonic clock, after so many evaluations, or once somebody says so."""

    deadline: float
    evaluations: int | None = None
    stopped: Callable[[], bool] = lambda: False

    def left(self, evaluations: int) -> int:
        """Return how many evaluations may follow at once; 0 ends the search."""
        if time.monotonic() >= self.deadline or self.stopped():
            return 0
        return AT_ONCE if self.evaluations is None else min(AT_ONCE, max(self.evaluations - evaluations, 0))


@dataclass
class Best:
    """The best candidate met so far: `value` of the objective, seconds of an iteration (infinite: not feasible).

    While nothing is feasible it is the one nearest to the objective's bounds (a `value` from `INFEASIBLE` on).
    `interrupted` says that Ctrl-C ended the search.
    """

    value: float = np.inf
    seconds: float = np.inf
    x: Vector = field(default_factory=lambda: np.zeros(0, np.int32))
    interrupted: bool = False

    def offer(self, value: float, x: Vector, evaluator: Evaluator) -> None:
        """Take a candidate that is better, unless it does not fit."""
        if value < min(self.value, UNFIT):
            self.value, self.x = value, x.copy()
            self.seconds = evaluator.iteration_seconds(x) if value < INFEASIBLE else np.inf


Search = Callable[[Evaluator, Limits, int, Callable[[Progress], None] | None], Best]
