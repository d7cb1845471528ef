"""Plays whose engines are off by as much as emulated ones."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given, strategies as st

from hetrl.cost.model import CostModel
from hetrl.simulator import simulate
from hetrl.simulator.noise import STRETCH_STEPS, Noise, Rate
from tests.simulator.simulate_cases import TWO_STAGES, small_plan, small_workload, two_sites

SHARE = 0.1
shares = st.floats(0.0, 0.9)


@given(shares, st.integers(), st.floats(1e-6, 1e6))
def test_a_value_is_off_by_at_most_the_share(share: float, seed: int, value: float) -> None:
    noise = Noise(share, str(seed))
    assert all(abs(noise.perturbed(value) / value - 1) <= share + 1e-9 for _ in range(10))


@given(shares, st.integers(1, 1000), st.integers(0, 1000))
def test_a_length_has_a_token_and_no_more_than_it_may(share: float, tokens: int, more: int) -> None:
    assert all(1 <= Noise(share, "lengths").length(tokens, tokens + more) <= tokens + more for _ in range(10))


def test_without_noise_all_is_as_it_was() -> None:
    assert Noise().perturbed(3.0) == 3.0
    assert Noise().length(7, 9) == 7
    assert Rate(Noise()).seconds(16, 4, 0.5) == 8.0


def test_draws_are_off_by_nothing_on_average() -> None:
    noise = Noise(SHARE, "mean")
    assert fmean(noise.perturbed(1.0) for _ in range(10_000)) == pytest.approx(1.0, abs=3 * SHARE / 3**0.5 / 100)


def test_a_rate_holds_for_a_stretch_of_one_batch() -> None:
    rate, chunks = Rate(Noise(SHARE, "rate")), STRETCH_STEPS // 16
    first = [rate.seconds(16, 4, 1.0) for _ in range(chunks)]
    second = [rate.seconds(16, 4, 1.0) for _ in range(chunks)]
    assert len({*first}) == len({*second}) == 1
    assert first[0] != second[0] != rate.seconds(16, 3, 1.0)  # the next stretch, another batch


def test_a_play_is_off_by_no_more_than_its_noise_and_repeats() -> None:
    workload = small_workload()
    plan, model = small_plan(workload, TWO_STAGES), CostModel(two_sites(), workload)
    exact, off, again = (simulate(plan, model, seed=3, iterations=6, noise=share) for share in (0.0, SHARE, SHARE))
    assert off == again
    assert off.iteration_seconds != exact.iteration_seconds
    assert (1 - SHARE) * exact.tasks["actor_training"] <= off.tasks["actor_training"]
    for name in ("actor_training", "actor_generation", "weight_sync"):
        assert off.tasks[name] <= (1 + SHARE) * exact.tasks[name]
