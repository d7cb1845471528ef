"""Random numbers for compiled code: one state, so that a seed fixes a whole search."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetrl.search.jit import njit

State = npt.NDArray[np.uint64]


def seeded(seed: int) -> State:
    """Return the state of a seed (any integer)."""
    return np.random.SeedSequence([abs(seed), int(seed < 0)]).generate_state(1, np.uint64) | np.uint64(1)


@njit
def uniform(state: State) -> float:
    """Return a number in [0, 1): xorshift64* (Vigna, arXiv 1402.6246)."""
    bits = state[0]
    bits ^= bits >> np.uint64(12)
    bits ^= bits << np.uint64(25)
    bits ^= bits >> np.uint64(27)
    state[0] = bits
    return float((bits * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@njit
def below(state: State, limit: int) -> int:
    """Return an integer in 0 .. limit - 1."""
    return int(uniform(state) * limit)
