"""What follows from measurements: the numbers that made them are found again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.efficiency import calibrated
from hetrl.cost.network import all_reduce_seconds
from hetrl.describe.measured import Measurement
from hetrl.hardware import Path as Route
from hetrl.measure.profile_fit import check_held_out, fit_exchange, fit_line, fit_shares, layer_seconds, measured_rates
from tests.measure.profile_cases import layer

positive = st.floats(1e-6, 1e6)
shares = st.floats(0.1, 0.95)
LAYERS = [
    *(layer("prefill layer", 1, tokens) for tokens in (128, 512, 2048)),
    *(layer("decode layer", batch, 1024) for batch in (1, 16, 256)),
    *(layer("training layer", 2, tokens) for tokens in (512, 2048)),
    layer("prefill layer", 2, 1024, use="held out"),
    layer("decode layer", 64, 512, use="held out"),
    layer("training layer", 1, 1024, use="held out"),
]


def made_by(gpu: str, truth: dict[str, float]) -> list[Measurement]:
    """The layers with the seconds that these shares make of them."""
    return [replace(one, seconds=(layer_seconds(one, measured_rates(gpu, truth)),)) for one in LAYERS]


@settings(max_examples=20)
@given(shares, shares, shares, st.sampled_from(["a100-80gb", "l4", "h100", "cpu"]))
def test_the_fit_finds_the_shares_that_made_the_layers(
    decode: float, prefill: float, training: float, gpu: str
) -> None:
    truth = {"prefill": prefill, "decode": decode, "training": training}
    layers = made_by(gpu, truth)
    found = fit_shares(layers, gpu)
    assert found == pytest.approx(truth, rel=0.05)
    checks = check_held_out(layers, gpu, found)
    assert len(checks) == 3
    assert all(abs(check.error) < 0.05 for check in checks)


def test_what_is_held_out_has_no_part_in_the_fit() -> None:
    layers = made_by("l4", {"prefill": 0.5, "decode": 0.6, "training": 0.7})
    spoiled = [replace(one, seconds=(one.seconds[0] * 3,)) if one.use == "held out" else one for one in layers]
    found = fit_shares(spoiled, "l4")
    assert found == fit_shares(layers, "l4")
    assert all(check.error == pytest.approx(1 / 3 - 1, abs=0.05) for check in check_held_out(spoiled, "l4", found))


def test_a_phase_without_points_gets_no_share() -> None:
    layers = [one for one in made_by("l4", {"prefill": 0.5, "training": 0.7}) if one.kind == "training layer"]
    found = fit_shares(layers, "l4")
    assert found == pytest.approx({"training": 0.7}, rel=0.05)
    assert [check.name.split(",")[0] for check in check_held_out(layers, "l4", found)] == ["training layer bf16"]
    assert fit_shares([], "l4") == {}


def test_the_fit_leaves_the_calibrated_numbers_alone() -> None:
    before = calibrated().of("l4")
    fit_shares(made_by("l4", {"prefill": 0.5, "decode": 0.6, "training": 0.7}), "l4")
    assert calibrated().of("l4") == before


@given(positive, positive, st.lists(st.floats(1, 1e3), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(fixed: float, slope: float, places: list[float]) -> None:
    points = [(x, fixed + slope * x) for x in places]
    found = fit_line(points)
    for x, y in points:
        assert found[0] + found[1] * x == pytest.approx(y, rel=1e-3)


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=6))
def test_no_measurement_gives_a_negative_delay_or_an_infinite_bandwidth(points: list[tuple[float, float]]) -> None:
    fixed, slope = fit_line(points)
    assert fixed >= 0
    assert slope > 0


@given(st.floats(1e-3, 10), st.floats(0.1, 1e3))
def test_an_exchange_is_that_of_the_cost_model(delay_ms: float, gbps: float) -> None:
    sizes = (2**10, 2**16, 2**22, 2**28)
    points = [
        Measurement(
            "all-reduce",
            {"backend": "gloo", "ranks": 2, "bytes": size},
            "bytes",
            float(size),
            1,
            (all_reduce_seconds(2, size, Route(delay_ms, gbps)),),
        )
        for size in sizes
    ]
    found = fit_exchange(points)
    assert found is not None
    assert found.delay_ms == pytest.approx(delay_ms, rel=1e-3)
    assert found.gbps == pytest.approx(gbps, rel=1e-3)
    assert fit_exchange(points[:1]) is None
