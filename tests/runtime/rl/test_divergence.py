"""Importance weights and KL estimates against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hetrl.errors import HetrlError
from hetrl.runtime.rl.divergence import importance_weights, kl_estimate

# One token per column: p(proximal) / p(behaviour); the last one is no target.
RATIOS = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 100.0]
MASK = np.array([[True] * 6 + [False]])
BEHAVIOUR = np.full((1, 7), -1.0, dtype=np.float32)
PROXIMAL = (BEHAVIOUR + np.log(RATIOS)).astype(np.float32)


@pytest.mark.parametrize(
    ("bound", "expected", "cut"),
    [
        ("none", [0.25, 0.5, 1.0, 2.0, 4.0, 8.0], 0),
        ("truncate", [0.25, 0.5, 1.0, 2.0, 3.0, 3.0], 2),
        ("mask", [0.0, 0.5, 1.0, 2.0, 4.0, 0.0], 2),
    ],
)
def test_weights_by_hand(bound: str, expected: list[float], cut: int) -> None:
    weights, fraction = importance_weights(PROXIMAL, BEHAVIOUR, MASK, bound=bound, cap=3.0, bounds=(0.49, 5.0))
    assert weights.dtype == np.float32
    assert weights[0].tolist() == pytest.approx([*expected, 0.0], rel=1e-6)
    assert fraction == pytest.approx(cut / 6)


def test_weights_of_equal_policies_are_exactly_one() -> None:
    weights, fraction = importance_weights(PROXIMAL, PROXIMAL, MASK, bound="mask")
    assert weights[0].tolist() == [1.0] * 6 + [0.0]
    assert fraction == 0.0


def test_weights_stay_finite_and_ignore_what_is_no_target() -> None:
    behaviour = BEHAVIOUR.copy()
    behaviour[0, 0], behaviour[0, 6] = -1e4, np.nan
    weights, _ = importance_weights(PROXIMAL, behaviour, MASK)
    assert np.isfinite(weights).all()
    assert weights[0, 0] == pytest.approx(np.exp(20.0))


def test_an_unknown_bound_or_estimator_is_refused_by_name() -> None:
    with pytest.raises(HetrlError, match='bound "clip" is not known; known: none, truncate, mask'):
        importance_weights(PROXIMAL, BEHAVIOUR, MASK, bound="clip")
    with pytest.raises(HetrlError, match='"k4" is not known; known: k1, k2, k3'):
        kl_estimate("k4", np.zeros(1), np.exp)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("k1", [0.5, -1.0, 0.0]), ("k2", [0.125, 0.5, 0.0]), ("k3", [0.1065306597, 0.7182818285, 0.0])],
)
def test_estimates_by_hand(name: str, expected: list[float]) -> None:
    assert kl_estimate(name, np.array([-0.5, 1.0, 0.0]), np.exp).tolist() == pytest.approx(expected)


def test_k1_and_k3_are_the_divergence_on_average_and_k2_is_for_near_policies() -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    divergence = 0.5 * np.log(0.5 / 0.2) + 0.2 * np.log(0.2 / 0.5)
    average = {name: policy @ kl_estimate(name, np.log(reference / policy), np.exp) for name in ("k1", "k2", "k3")}
    assert average["k1"] == pytest.approx(divergence)
    assert average["k3"] == pytest.approx(divergence)
    assert average["k2"] != pytest.approx(divergence, rel=0.01)
    near = policy + np.array([1e-4, 0.0, -1e-4])
    exact = policy @ np.log(policy / near)
    assert policy @ kl_estimate("k2", np.log(near / policy), np.exp) == pytest.approx(exact, rel=1e-3)
