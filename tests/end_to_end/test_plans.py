"""Whatever the plan, a run gives what the plan on one device gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from lab.planned.runs import PlannedRuns, make_weights

SEEDS = {"grpo": range(1), "ppo": range(4)}  # in each mode
SERVERS = 2  # they take the longest to start
CASES = [(kind, mode, seed) for kind, seeds in SEEDS.items() for mode in ("sync", "async") for seed in seeds]


@pytest.fixture(scope="module")
def started(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], PlannedRuns]:
    """Return the runs of an algorithm and mode, with that on one device; it is there once."""
    return cache(lambda kind, mode: PlannedRuns(tmp_path_factory.mktemp(f"{kind}-{mode}"), mode, weights, kind))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize(("kind", "mode", "seed"), CASES)
def test_a_random_plan_gives_what_one_device_gives(
    started: Callable[[str, str], PlannedRuns], kind: str, mode: str, seed: int
) -> None:
    runs = started(kind, mode)
    ran = runs.run(runs.random_plan(100 + seed, SERVERS))
    assert runs.disagreement(ran) == ""
