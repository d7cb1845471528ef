"""Boxes and runs against lists of all elements."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from hetrl.runtime.megatron import slices
from hetrl.runtime.megatron.slices import Box, Runs

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=2)


def elements(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, stop) for start, stop in box)))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    pairs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=2, max_size=2))
    return tuple((start, start + length) for start, length in pairs)


@given(SHAPES, st.data())
def test_a_flat_range_is_at_most_three_boxes_in_its_order(shape: list[int], data: st.DataObject) -> None:
    everything = elements(slices.whole(shape))
    start = data.draw(st.integers(0, len(everything)))
    stop = data.draw(st.integers(start, len(everything)))
    found = list(slices.boxes(start, stop, shape))
    assert len(found) <= 3
    assert [element for box in found for element in elements(box)] == everything[start:stop]
    assert sum(map(slices.size_of, found)) == stop - start


@given(
    st.integers(0, 5), st.integers(1, 5), st.integers(0, 5), st.integers(1, 4), st.integers(0, 60), st.integers(0, 60)
)
def test_runs_count_and_yield_their_elements(first: int, size: int, gap: int, count: int, a: int, b: int) -> None:
    runs = Runs(first, size, size + gap, count)
    everything = [first + run * (size + gap) + i for run in range(count) for i in range(size)]
    start, stop = sorted((a, b))
    assert runs.before(start) == sum(element < start for element in everything)
    assert [i for low, high in runs.within(start, stop) for i in range(low, high)] == [
        element for element in everything if start <= element < stop
    ]


@given(boxes(), boxes())
def test_boxes_have_in_common_what_both_hold(left: Box, right: Box) -> None:
    common = slices.overlap(left, right)
    assert set(elements(common) if common is not None else ()) == set(elements(left)) & set(elements(right))


@given(boxes(), boxes())
def test_a_box_inside_another_counts_from_its_beginning(outer: Box, box: Box) -> None:
    placed = slices.inside(box, outer)
    assert slices.shape_of(placed) == slices.shape_of(box)
    assert slices.indices(placed, outer) == tuple(slice(start, stop) for start, stop in box)


@given(boxes())
def test_a_box_is_read_as_it_is_written(box: Box) -> None:
    assert slices.parse(slices.text(box)) == box
