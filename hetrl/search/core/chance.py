"""The state of the compiled core's random numbers: one word, so that a seed fixes a whole search."""

from __future__ import annotations

import numpy as np

from hetrl.search.core.records import Words1


def seeded(seed: int) -> Words1:
    """Return the state of a seed (any integer)."""
    return np.random.SeedSequence([abs(seed), int(seed < 0)]).generate_state(1, np.uint64) | np.uint64(1)
