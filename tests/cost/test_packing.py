"""Micro-batches of samples whose lengths are not known yet, against those of many drawn ones."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from hetrl.cost.formulas import micro_batch_count
from hetrl.cost.packing import DEALT, nearest, packing
from hetrl.dealing import micro_batches
from hetrl.lengths import Lengths, empirical

PROMPT_TOKENS, DRAWN_REPLICAS = 100, 600
LENGTHS = {
    "lognormal": Lengths(300.0, 4000, "lognormal"),
    "uniform": Lengths(500.0, 1000, "uniform"),
    "empirical": empirical([20, 40, 50, 60, 900], 1000),
}


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("samples", [2, 3, 8, 32, 128])
@pytest.mark.parametrize("kind", LENGTHS)
def test_shares_are_those_of_many_drawn_replicas(kind: str, samples: int, micro_batch: int) -> None:
    chance, counts, fullest, tokens = random.Random(0), [], [], []
    for _ in range(DRAWN_REPLICAS):
        lengths = [PROMPT_TOKENS + length for length in LENGTHS[kind].draw(samples, chance)]
        parts = micro_batches(range(samples), lengths, micro_batch)
        filled = [sum(lengths[i] for i in part) for part in parts]
        counts.append(len(filled))
        fullest.append(max(filled))
        tokens.append(sum(filled))
    found = packing(LENGTHS[kind], PROMPT_TOKENS, nearest(samples), micro_batch)
    assert found.per_sample == pytest.approx(fmean(counts) / samples, rel=0.08)
    assert found.fullest == pytest.approx(fmean(fullest) * fmean(counts) / fmean(tokens), rel=0.08)


@pytest.mark.parametrize("samples", [1, 5, 48])
def test_samples_of_one_length_fill_micro_batches_evenly(samples: int) -> None:
    found = packing(Lengths(500.0, 500), PROMPT_TOKENS, nearest(samples), 4)
    count = -(-samples // 4)
    assert micro_batch_count(samples, found.per_sample) == count
    assert found.fullest == pytest.approx(-(-samples // count) * count / samples)


def test_the_nearest_number_is_dealt() -> None:
    for samples in range(1, 600):
        there = abs(DEALT[nearest(samples)] - samples)
        assert all(there <= abs(other - samples) for other in DEALT)


@pytest.mark.parametrize("samples", [1, 33, 86, 100, 519])
@pytest.mark.parametrize("micro_batch", [1, 3, 16, 64])
def test_samples_of_one_length_make_as_few_micro_batches_as_they_can(samples: int, micro_batch: int) -> None:
    packed = packing(Lengths(100, 100), 10, nearest(samples), micro_batch)
    assert micro_batch_count(samples, packed.per_sample) == -(-samples // micro_batch)
