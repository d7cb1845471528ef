from __future__ import annotations

import pytest

from hetrl.errors import UsageError
from hetrl.runtime.island import Island, island_from_environment

_STORE = {"HETRL_STORE_HOST": "10.0.0.1", "HETRL_STORE_PORT": "41000"}
_OURS = {"HETRL_RANK": "3", "HETRL_WORLD_SIZE": "4", "HETRL_LOCAL_RANK": "1"}
_SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}


def test_our_names_come_before_those_of_slurm() -> None:
    island = island_from_environment({**_OURS, **_SLURM, **_STORE})
    assert island == Island(rank=3, size=4, local_rank=1, host="10.0.0.1", port=41000)


def test_slurm_alone_is_enough() -> None:
    assert island_from_environment({**_SLURM, **_STORE}) == Island(5, 8, 2, "10.0.0.1", 41000)


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
