from __future__ import annotations

from pathlib import Path

import pytest

from hetrl.errors import GangTimeoutError, UsageError
from hetrl.runtime.run.island import IslandRank, check_contiguous, island_from_environment, started_by_mpi

_STORE = {"HETRL_STORE_HOST": "10.0.0.1", "HETRL_STORE_PORT": "41000"}
_OURS = {"HETRL_RANK": "3", "HETRL_WORLD_SIZE": "4", "HETRL_LOCAL_RANK": "1"}
_SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}


def test_our_names_come_before_those_of_slurm() -> None:
    island = island_from_environment({**_OURS, **_SLURM, **_STORE})
    assert island == IslandRank(rank=3, size=4, local_rank=1, host="10.0.0.1", port=41000)


def test_slurm_alone_is_enough() -> None:
    assert island_from_environment({**_SLURM, **_STORE}) == IslandRank(5, 8, 2, "10.0.0.1", 41000)


@pytest.mark.parametrize("variables", [{**_OURS, **_STORE}, {**_SLURM, **_STORE}])
def test_each_missing_variable_is_named(variables: dict[str, str]) -> None:
    for name in variables:
        with pytest.raises(UsageError, match=f"lacks {name};"):
            island_from_environment({key: value for key, value in variables.items() if key != name})


def test_an_empty_environment_names_everything() -> None:
    with pytest.raises(UsageError, match="HETRL_RANK, HETRL_WORLD_SIZE, HETRL_LOCAL_RANK, HETRL_STORE_HOST"):
        island_from_environment({})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HETRL_RANK", "-1", "HETRL_RANK='-1' is not a whole number"),
        ("HETRL_RANK", "4", "HETRL_RANK=4 .* do not fit HETRL_WORLD_SIZE=4"),
        ("HETRL_LOCAL_RANK", "x", "HETRL_LOCAL_RANK='x'"),
        ("HETRL_STORE_PORT", "65536", "HETRL_STORE_PORT=65536 is not a port"),
    ],
)
def test_wrong_values_are_named(name: str, value: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        island_from_environment({**_OURS, **_STORE, name: value})


def test_the_launcher_is_asked_before_mpi() -> None:
    island = island_from_environment({"PMI_RANK": "7", **_OURS, **_STORE})
    assert (island.rank, island.size) == (3, 4)
    assert not started_by_mpi(_OURS)


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
