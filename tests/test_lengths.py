"""Distributions of response lengths: moments against draws, and what an experiment file may say of them."""

from __future__ import annotations

import heapq
import math
import random
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from hetrl.cost.batch_profile import batch_profile
from hetrl.describe.response_lengths import ResponseLengths, read_lengths
from hetrl.errors import UsageError
from hetrl.lengths import KEPT_VALUES, Lengths, empirical, log_median, lognormal_sigma

MEASURED = empirical([random.Random(seed).choice((20, 90, 300, 900)) for seed in range(500)], 1200)
KINDS = [
    Lengths(300, 300),
    Lengths(300, 500, "uniform"),
    Lengths(300, 900, "uniform", 100.0),
    Lengths(300, 900, "lognormal"),
    Lengths(300, 4096, "lognormal", 0.5),
    MEASURED,
]


@pytest.mark.parametrize("response", KINDS)
def test_drawn_lengths_have_the_moments(response: Lengths) -> None:
    drawn = np.array(response.draw(64_000, random.Random(1)), dtype=float)
    assert drawn.mean() == pytest.approx(response.mean, rel=0.02)
    assert (drawn**2).mean() == pytest.approx(response.second_moment, rel=0.02)
    assert drawn.std() == pytest.approx(response.deviation, rel=0.03, abs=1e-6)
    assert drawn.reshape(-1, 16).max(axis=1).mean() == pytest.approx(response.longest_of(16), rel=0.02)
    assert drawn.min() >= 1 and drawn.max() <= response.maximum
    assert response.survival.sum() * response.cell_tokens == pytest.approx(response.mean, rel=0.003)


def test_a_uniform_distribution_may_end_below_the_longest_response() -> None:
    drawn = Lengths(300, 900, "uniform", 100.0).draw(5000, random.Random(2))
    assert (min(drawn), max(drawn)) == (200, 400)


@given(st.integers(2, 4000), st.floats(0.05, 1.5))
def test_sigma_and_p95_say_the_same(mean: int, sigma: float) -> None:
    p95 = math.exp(log_median(mean, 20 * mean, sigma) + NormalDist().inv_cdf(0.95) * sigma)
    assert lognormal_sigma(mean, 20 * mean, p95) == pytest.approx(sigma, rel=1e-3)


@given(st.sampled_from(KINDS), st.integers(1, 400), st.integers(1, 400))
def test_a_profile_generates_every_token_within_its_limit(response: Lengths, samples: int, limit: int) -> None:
    profile = batch_profile(response, samples, limit)
    assert sum(steps * batch for steps, batch in profile) == pytest.approx(samples * response.mean, rel=0.005)
    assert all(batch <= min(samples, limit) * (1 + 1e-9) for _, batch in profile)
    assert len(profile) <= 12
    more = batch_profile(response, samples, limit + 1)
    assert sum(steps for steps, _ in more) <= sum(steps for steps, _ in profile) * (1 + 1e-3)


def _played_steps(response: Lengths, samples: int, limit: int, seed: int) -> int:
    """Return the steps until every sample has ended, each taking the first free slot."""
    free = [0] * min(samples, limit)
    for length in response.draw(samples, random.Random(seed)):
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


@pytest.mark.parametrize("response", KINDS)
@pytest.mark.parametrize(("samples", "limit"), [(64, 64), (64, 50), (64, 30), (256, 20)])
def test_a_profile_takes_as_many_steps_as_played_slots(response: Lengths, samples: int, limit: int) -> None:
    played = np.mean([_played_steps(response, samples, limit, seed) for seed in range(60)])
    assert sum(steps for steps, _ in batch_profile(response, samples, limit)) == pytest.approx(played, rel=0.05)


def test_fixed_lengths_run_in_whole_waves() -> None:
    assert batch_profile(Lengths(100, 100), 64, 64) == ((100.0, 64.0),)
    assert batch_profile(Lengths(100, 100), 65, 64) == ((200.0, 32.5),)


# --- what an experiment says ---


def _lengths(**keys: Any) -> Lengths:
    return ResponseLengths(**keys).to_lengths(1024)


def test_an_experiment_names_a_distribution() -> None:
    assert _lengths(kind="fixed") == Lengths(1024, 1024)
    assert _lengths(kind="uniform", low=100, high=300) == Lengths(200.0, 1024, "uniform", 100.0)
    assert _lengths(kind="lognormal", mean=200, sigma=0.7) == Lengths(200.0, 1024, "lognormal", 0.7)
    spread = _lengths(kind="lognormal", mean=200, p95=600).spread
    assert spread == pytest.approx(lognormal_sigma(200, 1024, 600))


def test_measured_lengths_are_cut_off_and_thinned(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('812\n{"tokens": 90, "prompt": "x"}\n\n5000\n')
    assert read_lengths(file) == [812, 90, 5000]
    assert ResponseLengths(kind="empirical", path="x").to_lengths(1024, read_lengths(file)).values == (90, 812, 1024)
    many = empirical(list(range(1, 30_001)), 40_000)
    assert len(many.values) == KEPT_VALUES
    assert many.mean == pytest.approx(15_000, rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "uniform", "low": 3}, "kind uniform takes high and low, got low"),
        ({"kind": "lognormal", "mean": 3}, "kind lognormal takes mean and p95 or sigma, got mean"),
        ({"kind": "lognormal", "mean": 3, "sigma": 1, "p95": 9}, "got mean, p95, sigma"),
        ({"kind": "fixed", "mean": 3}, "kind fixed takes no other key, got mean"),
        ({"kind": "empirical"}, "kind empirical takes path, got none"),
        ({"kind": "uniform", "low": 9, "high": 3}, "low .9. must not be above high .3."),
        ({"kind": "lognormal", "mean": -1, "sigma": 1}, "greater than 0"),
    ],
)
def test_keys_that_do_not_fit_a_kind_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ResponseLengths(**keys)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "uniform", "low": 3, "high": 2000}, "high .2000. is above batch.response_tokens .1024.; lower it"),
        ({"kind": "lognormal", "mean": 1024, "sigma": 1}, "mean .1024. must be below batch.response_tokens"),
        ({"kind": "lognormal", "mean": 200, "p95": 1024}, "p95 .1024. must lie between the mean .200."),
        ({"kind": "lognormal", "mean": 50, "p95": 1000}, "no lognormal has the mean 50 and p95 1000: give sigma"),
    ],
)
def test_lengths_that_cannot_be_are_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _lengths(**keys)


@pytest.mark.parametrize("text", ["", "\n", "many\n", "12.5\n", "0\n", '{"length": 3}\n', "true\n"])
def test_a_file_without_lengths_names_its_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"lengths\.txt: (line 1: .* is no number|holds no lengths).*812"):
        read_lengths(file)
