"""Whatever the plan, a run gives what the plan on one device gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lab.planned.runs import PlannedRuns, make_weights

SEEDS = range(1)  # of each algorithm in each mode; the benchmark `plans` has 60 of either
CASES = [(kind, mode, seed) for kind in ("ppo", "grpo") for mode in ("sync", "async") for seed in SEEDS]
SERVERS = 2  # they take the longest to start


@pytest.fixture(scope="module")
def runs(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], PlannedRuns]:
    @cache
    def runs_of(kind: str, mode: str) -> PlannedRuns:
        reference = None if mode == "sync" else runs_of(kind, "sync").reference
        return PlannedRuns(tmp_path_factory.mktemp(f"{kind}-{mode}"), mode, weights, kind, reference)

    return runs_of


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize(("kind", "mode", "seed"), CASES)
def test_a_random_plan_gives_what_one_device_gives(
    runs: Callable[[str, str], PlannedRuns], kind: str, mode: str, seed: int
) -> None:
    made = runs(kind, mode)
    assert made.disagreement(made.run(made.random_plan(100 + seed, SERVERS))) == ""
