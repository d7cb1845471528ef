"""Every kind of rank lives through a run on the fake device, and what a GPU would die of is found there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrl.runtime.checkpoints.files import path_of
from lab.fake_cuda.ranks import RankError, Stage
from tests.rehearsal.rank_cases import CRITIC, LOSSES, REFERENCE, REWARD, TRAINING, VALUES, Case, live

TWO_STAGES = ((0, 1), (1, 2))
SHARDED = (("optimizer_sharding", "data_parallel"),)
SELECTIVE = (("recompute", "selective"),)
RECOMPUTED = (("recompute", "full"),)
UNEQUAL = Case(REFERENCE, 2, samples=(4, 12), wider=2)
CASES = (
    Case(TRAINING, 0),
    *(Case(TRAINING, rank, tensor=2) for rank in range(2)),
    *(Case(TRAINING, rank, stages=TWO_STAGES) for rank in range(2)),
    *(Case(TRAINING, rank, samples=(10, 6), settings=SHARDED) for rank in range(2)),
    *(Case(TRAINING, rank, 2, TWO_STAGES, settings=SELECTIVE) for rank in (0, 3)),
    *(Case(TRAINING, rank, 2, TWO_STAGES, (8, 8), (*SHARDED, *RECOMPUTED)) for rank in (0, 3, 5, 7)),
    *(Case(REFERENCE, rank, 2, TWO_STAGES, (8, 8)) for rank in (0, 6)),
    *(Case(REFERENCE, rank, samples=(4, 12), wider=2) for rank in range(3)),
    Case(CRITIC, 0),
    *(Case(CRITIC, rank, 2, TWO_STAGES, (8, 8), SHARDED) for rank in (0, 3, 6)),
    *(Case(VALUES, rank, 2, TWO_STAGES) for rank in (0, 3)),
    Case(REWARD, 1, 2),
)
DIED_OF = {
    "a world without gloo": "No backend type associated with device type cpu",
    "a batch on the host": "FakeTensorDeviceMismatchError",
    "gradients that stay": "asleep, and",
    "padded sequences": r"computed for 224 tokens of \d+",
    "one world for unequal replicas": "the layout needs a running world",
}


@pytest.fixture(scope="module")
def written(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each training, in a world of one rank."""
    directories = {task: tmp_path_factory.mktemp(task) for task in LOSSES}
    for task, directory in directories.items():
        stage.play(live, Case(task, 0), directory)
    return {task: path_of(directory / "checkpoints", 1) for task, directory in directories.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_lives_through_a_run(case: Case, stage: Stage, tmp_path: Path, written: dict[str, Path]) -> None:
    played = stage.play(live, case, tmp_path, None, written.get(case.task))
    seen, first = played.result, case.rank in case.leads
    assert seen["devices"] == {"cuda:0"}
    assert seen["scores"] == ((16, 14) if first else None)
    assert played.peak_bytes > 0
    if case.task in LOSSES:
        assert {"loss", "grad_norm", "learning_rate"} <= set(seen["metrics"])
        head = {TRAINING: "lm_head.weight", CRITIC: "score.weight"}[case.task]
        assert (head in seen["exported"]) == first
        assert seen["restored"] == {"step": 1}
        alone = case == Case(case.task, 0)
        assert ("safetensors: not whole" in seen.get("not whole", "")) == (first and not alone)


@pytest.mark.parametrize("defect", DIED_OF)
def test_a_defect_is_found(defect: str, stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=DIED_OF[defect]):
        stage.play(live, UNEQUAL if "unequal" in defect else CASES[0], tmp_path, defect)
