"""How many micro-batches a replica's samples make, and how full they are: what `hetrl.dealing` does with typical ones.

Typical samples are those in the middle of so many equally likely parts of the distribution of their lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from hetrl.dealing import micro_batches
from hetrl.lengths import Lengths

# Numbers of samples that are dealt; others are as the nearest of these. More than the last do not change the shares.
DEALT: tuple[int, ...] = (*range(1, 33), *(step << power for power in range(3, 7) for step in (5, 6, 7, 8)))


@dataclass(frozen=True)
class Packing:
    """The micro-batches per sample, and the tokens of the fullest over those of the mean one."""

    per_sample: float
    fullest: float


def nearest(samples: int) -> int:
    """Return the place in `DEALT` of the number that is nearest to this one."""
    place = bisect_left(DEALT, samples)
    if place in (0, len(DEALT)):
        return min(place, len(DEALT) - 1)
    return place - (samples - DEALT[place - 1] < DEALT[place] - samples)


@lru_cache(maxsize=4096)
def packing(response: Lengths, prompt_tokens: int, place: int, micro_batch: int) -> Packing:
    """Return how `DEALT[place]` samples are dealt to micro-batches of so many."""
    lengths = [prompt_tokens + length for length in response.typical(DEALT[place])]
    tokens = [sum(lengths[i] for i in part) for part in micro_batches(range(len(lengths)), lengths, micro_batch)]
    return Packing(len(tokens) / len(lengths), max(tokens) * len(tokens) / sum(tokens))
