"""How many micro-batches a replica's samples make, and how full they are: what `hetrl.dealing` does on average.

Typical lengths, those in the middle of so many equally likely parts of their distribution, have no outliers where they
are few, and the longest sequence decides how many micro-batches there are. So typical lengths of many replicas are
dealt out to them at random: a Latin hypercube (McKay, Beckman, Conover 1979, doi 10.1080/00401706.1979.10489755).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from hetrl.dealing import micro_batches
from hetrl.lengths import Lengths

# Numbers of samples that are dealt; others are as the nearest of these. More than the last do not change the shares.
DEALT: tuple[int, ...] = (*range(1, 33), *(step << power for power in range(3, 7) for step in (5, 6, 7, 8)))
REPLICAS, LENGTHS = 8, 512  # at least so many are dealt: tests/cost/test_packing.py holds them against hundreds


@dataclass(frozen=True)
class Packing:
    """The micro-batches per sample, and the tokens of the fullest over those of the mean one; means over replicas."""

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
    count, fullest, tokens = 0, 0, 0
    replicas = _dealt(response, DEALT[place])
    for responses in replicas:
        lengths = [prompt_tokens + length for length in responses]
        filled = [sum(lengths[i] for i in part) for part in micro_batches(range(len(lengths)), lengths, micro_batch)]
        count, fullest, tokens = count + len(filled), fullest + max(filled), tokens + sum(filled)
    # What is counted for the nearest number of samples is exact for the others where all are equally long.
    per_sample = 1 / micro_batch if response.kind == "fixed" else count / (DEALT[place] * len(replicas))
    return Packing(per_sample, fullest * count / (tokens * len(replicas)))


@lru_cache(maxsize=256)
def _dealt(response: Lengths, samples: int) -> tuple[tuple[int, ...], ...]:
    """Return the response lengths of each of some replicas with so many samples."""
    replicas = 1 if response.kind == "fixed" else max(REPLICAS, -(-LENGTHS // samples))
    lengths = list(response.typical(samples * replicas))
    random.Random(samples).shuffle(lengths)
    return tuple(tuple(lengths[first : first + samples]) for first in range(0, len(lengths), samples))
