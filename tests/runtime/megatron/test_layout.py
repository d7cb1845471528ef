from __future__ import annotations

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.layout import Layout

TWO_BY_THREE_BY_TWO = Layout(tensor=2, stages=((0, 1), (1, 5)), samples=(4, 2, 2), micro_batch=2)


def test_ranks_run_over_tensor_then_data_then_pipeline() -> None:
    layout = TWO_BY_THREE_BY_TWO
    assert (layout.data, layout.pipeline, layout.layers, layout.world_size) == (3, 2, 5, 12)
    assert [layout.rank_of(0, 0, 0), layout.rank_of(0, 0, 1), layout.rank_of(1, 0, 0), layout.rank_of(0, 1, 0)] == [
        0,
        1,
        2,
        6,
    ]


def test_coordinates_invert_rank_of() -> None:
    layout = TWO_BY_THREE_BY_TWO
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [layout.rank_of(*place) for place in places] == list(range(layout.world_size))


@pytest.mark.parametrize("rank", [-1, 12])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(HetrlError, match=f"rank {rank}"):
        TWO_BY_THREE_BY_TWO.coordinates(rank)


def test_a_place_outside_the_grid_is_refused() -> None:
    with pytest.raises(HetrlError, match="no rank at replica 3"):
        TWO_BY_THREE_BY_TWO.rank_of(3, 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": ()}, "one per replica"),
        ({"samples": (4, 0)}, "positive"),
        ({"stages": ()}, "at least one stage"),
        ({"stages": ((0, 2), (3, 4))}, "without gaps"),
        ({"stages": ((0, 2), (2, 2))}, "non-empty"),
        ({"stages": ((1, 2),)}, "from 0"),
        ({"tensor": 0}, "at least 1"),
    ],
)
def test_an_impossible_layout_is_refused(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"tensor": 1, "stages": ((0, 4),), "samples": (4,), "micro_batch": 2}
    with pytest.raises(HetrlError, match=message):
        Layout(**(fields | change))  # type: ignore[arg-type]
