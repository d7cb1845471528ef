"""How many sequences a rollout replica decodes at once, from the first token of its samples to the last one.

    slots = min(samples, limit); waves = samples / slots
    starts per slot:  a(0) = 1, a(t) = sum over lengths l of P(l) a(t - l), until `waves` samples have started
    running per slot: r(t) = sum over s <= t of a(s) P(L > t - s): 1 until the queue is empty, then what drains

The starts are the renewal process of the lengths (Feller, Probability Theory II, chapter XI), taken as a fluid. Of n
slots, at least one runs with probability 1 - (1 - r)^n; this makes the last step that of the longest sample.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetrl.lengths import Lengths

PLAYED_WAVES = 4  # the waves before them take the mean length each: the start is forgotten by then
LEAST_RUNNING = 1e-9  # of a slot: below, it is empty
Profile = tuple[tuple[float, float], ...]


@lru_cache(maxsize=100_000)
def batch_profile(response: Lengths, samples: float, limit: float) -> Profile:
    """Return (decode steps, sequences in each of them), at most a dozen pairs; the products sum to all tokens.

    Lengths that are all alike run in waves, here of equal size: a last wave that is nearly empty takes as many steps as
    a full one, and equal waves are the best case of both.
    """
    slots = max(min(samples, limit), 1.0)
    waves = samples / slots
    if response.kind == "fixed":
        whole = math.ceil(waves - 1e-9)
        return ((whole * float(response.maximum), samples / whole),)
    before = max(math.floor(waves) - PLAYED_WAVES, 0)
    running = _running(response, waves - before)
    any_runs = 1 - (1 - running) ** slots
    level = np.floor(-np.log2(np.maximum(running * slots, 1.0) / slots)).astype(int)  # full to half, half to a quarter
    steps = np.bincount(level, any_runs) * response.cell_tokens
    tokens = np.bincount(level, running) * response.cell_tokens * slots
    drained = ((s, t / s) for s, t in zip(steps.tolist(), tokens.tolist(), strict=True) if s > 0)
    return ((before * response.mean, slots), *drained) if before else tuple(drained)


def _running(response: Lengths, waves: float) -> NDArray[np.float64]:
    """Return r(t) in each cell of the lengths' grid for so many samples per slot."""
    starts, total = _starts(response)
    last = int(np.searchsorted(total, waves))
    cut = starts[: last + 1].copy()
    cut[last] -= total[last] - waves
    found = np.convolve(cut, response.survival)
    return np.clip(found[found > LEAST_RUNNING], 0.0, 1.0)


@lru_cache(maxsize=64)
def _starts(response: Lengths) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the starts per slot in each cell and their sums, up to `PLAYED_WAVES` + 1.

    A sample of k cells frees its slot k cells later; those shorter than half a cell do so at once.
    """
    survival = response.survival
    ends_after = -np.diff(survival, append=0.0)[::-1]  # of the longest first
    at_once = 1 / survival[0]
    starts, total = [at_once], at_once
    while total < PLAYED_WAVES + 1:
        past = starts[-len(ends_after) :]
        starts.append(at_once * float(np.dot(past, ends_after[-len(past) :])))
        total += starts[-1]
    return np.array(starts), np.cumsum(starts)
