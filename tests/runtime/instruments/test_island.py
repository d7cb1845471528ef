from __future__ import annotations

from pathlib import Path

import pytest

from hetrl.errors import GangTimeoutError, UsageError
from hetrl.runtime.instruments.island import check_contiguous, island_from_environment, started_by_mpi

_SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize("name", _SLURM)
def test_a_missing_variable_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"lacks {name};"):
        island_from_environment({key: value for key, value in _SLURM.items() if key != name}, tmp_path)


def test_an_empty_environment_names_everything(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID; start this process with srun"):
        island_from_environment({}, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SLURM_PROCID", "-1", "SLURM_PROCID='-1' is not a whole number"),
        ("SLURM_PROCID", "8", "SLURM_PROCID=8 .* do not fit SLURM_NTASKS=8"),
        ("SLURM_LOCALID", "x", "SLURM_LOCALID='x'"),
    ],
)
def test_wrong_values_are_named(name: str, value: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        island_from_environment({**_SLURM, name: value}, tmp_path)


def test_mpi_is_asked_where_it_started_the_process() -> None:
    assert started_by_mpi({"PMI_RANK": "7", **_SLURM})
    assert not started_by_mpi(_SLURM)


def test_a_plain_srun_meets_at_a_file_of_its_step(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    ranks = [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    with pytest.raises(GangTimeoutError, match=r"island-12.0.endpoint: rank 0 of the step did not start"):
        island_from_environment(ranks[1], tmp_path, timeout_seconds=0)
    first, second = (island_from_environment(env, tmp_path, interface="lo") for env in ranks)
    assert (first.rank, second.rank, first.size) == (0, 1, 2)
    assert (first.host, first.port) == (second.host, second.port)
    assert first.host == "127.0.0.1"
    other = island_from_environment({**ranks[0], "SLURM_STEP_ID": "1"}, tmp_path, interface="lo")
    assert other.rank == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["island-12.0.endpoint", "island-12.1.endpoint"]


def test_ranks_of_a_node_follow_each_other() -> None:
    check_contiguous(["b", "b", "a", "a"])
    with pytest.raises(UsageError, match=r"the ranks of a, b are mixed with others; use srun --distribution=block"):
        check_contiguous(["a", "b", "a", "b", "c"])
