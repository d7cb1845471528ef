"""Whatever the plan, a run gives what the plan on one device gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.planned.runs import PlannedRuns, make_weights

SEEDS = range(2)  # in each mode, and 60 in the benchmark `plans`; PPO has the tasks of GRPO and three more
SERVERS = 2  # they take the longest to start


@pytest.fixture(scope="module", params=["sync", "async"])
def runs(request: pytest.FixtureRequest, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> PlannedRuns:
    return PlannedRuns(tmp_path_factory.mktemp(request.param), request.param, weights, "ppo")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_gives_what_one_device_gives(runs: PlannedRuns, seed: int) -> None:
    ran = runs.run(runs.random_plan(100 + seed, SERVERS))
    assert runs.disagreement(ran) == ""
