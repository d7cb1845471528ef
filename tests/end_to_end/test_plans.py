"""Whatever the plan, a run gives what the plan on one device gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lab.planned.runs import PlannedRuns, make_weights

MODES = ("sync", "async")  # a plan of PPO, which has all tasks, in each; the benchmark `plans` has 60, and 60 of GRPO
SEED = 100
SERVERS = 2  # they take the longest to start


@pytest.fixture(scope="module")
def runs(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PlannedRuns]:
    @cache
    def runs_of(mode: str) -> PlannedRuns:
        reference = None if mode == "sync" else runs_of("sync").reference
        return PlannedRuns(tmp_path_factory.mktemp(mode), mode, weights, "ppo", reference)

    return runs_of


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("mode", MODES)
def test_a_random_plan_gives_what_one_device_gives(runs: Callable[[str], PlannedRuns], mode: str) -> None:
    made = runs(mode)
    assert made.disagreement(made.run(made.random_plan(SEED, SERVERS))) == ""
