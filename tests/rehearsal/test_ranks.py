"""Every kind of rank lives through a run on the fake device, and what a GPU would die of is found there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrl.runtime.megatron.checkpoint_files import path_of
from lab.fake_cuda.ranks import RankError, Stage
from tests.rehearsal.rank_cases import REFERENCE, TRAINING, Case, live

TWO_STAGES = ((0, 1), (1, 2))
SHARDED = (("optimizer_sharding", "data_parallel"),)
SELECTIVE = (("recompute", "selective"),)
RECOMPUTED = (("recompute", "full"),)
CASES = (
    Case(TRAINING, 0),
    *(Case(TRAINING, rank, tensor=2) for rank in range(2)),
    *(Case(TRAINING, rank, stages=TWO_STAGES) for rank in range(2)),
    *(Case(TRAINING, rank, samples=(10, 6), settings=SHARDED) for rank in range(2)),
    *(Case(TRAINING, rank, 2, TWO_STAGES, settings=SELECTIVE) for rank in (0, 3)),
    *(Case(TRAINING, rank, 2, TWO_STAGES, (8, 8), (*SHARDED, *RECOMPUTED)) for rank in (0, 3, 5, 7)),
    *(Case(REFERENCE, rank, 2, TWO_STAGES, (8, 8)) for rank in (0, 6)),
    *(Case(REFERENCE, rank, samples=(4, 12), wider=2) for rank in range(3)),
)
DIED_OF = {
    "a world without gloo": "No backend type associated with device type cpu",
    "a batch on the host": "FakeTensorDeviceMismatchError",
    "gradients that stay": "asleep, and",
    "padded sequences": r"computed for 224 tokens of \d+",
    "one world for unequal replicas": "the layout needs a running world",
}


@pytest.fixture(scope="module")
def written(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a world of one rank."""
    directory = tmp_path_factory.mktemp("written")
    stage.play(live, CASES[0], directory)
    return path_of(directory / "checkpoints", 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_lives_through_a_run(case: Case, stage: Stage, tmp_path: Path, written: Path) -> None:
    played = stage.play(live, case, tmp_path, None, written)
    seen, first = played.result, case.rank in case.leads
    assert seen["devices"] == {"cuda:0"}
    assert seen["scores"] == ((16, 14) if first else None)
    assert played.peak_bytes > 0
    if case.task == TRAINING:
        assert {"loss", "grad_norm", "learning_rate"} <= set(seen["metrics"])
        assert ("lm_head.weight" in seen["exported"] or len(seen["exported"]) > 20) == first
        assert seen["restored"] == {"step": 1}
        alone = case == CASES[0]
        assert ("safetensors: not whole" in seen.get("not whole", "")) == (first and not alone)


@pytest.mark.parametrize("defect", DIED_OF)
def test_a_defect_is_found(defect: str, stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=DIED_OF[defect]):
        stage.play(live, CASES[-1] if "unequal" in defect else CASES[0], tmp_path, defect)
