"""Who is at work when, and what groups wait for."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from hetrl.runtime.rl.timeline import CONTROLLER, Span, Timeline, waits
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, REFERENCE_INFERENCE

SYNC = (
    Span(ACTOR_GENERATION, 0.0, 4.0),
    Span(REFERENCE_INFERENCE, 5.0, 6.0),
    Span(ACTOR_TRAINING, 6.0, 9.0),
    Span("weight_sync", 9.0, 10.0),
)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ((ACTOR_GENERATION,), {CONTROLLER: 1.0, REFERENCE_INFERENCE: 1.0, ACTOR_TRAINING: 3.0, "weight_sync": 1.0}),
        ((REFERENCE_INFERENCE,), {ACTOR_GENERATION: 4.0, CONTROLLER: 1.0, ACTOR_TRAINING: 3.0, "weight_sync": 1.0}),
        ((ACTOR_TRAINING,), {ACTOR_GENERATION: 4.0, CONTROLLER: 1.0, REFERENCE_INFERENCE: 1.0, "weight_sync": 1.0}),
        ((ACTOR_GENERATION, ACTOR_TRAINING), {CONTROLLER: 1.0, REFERENCE_INFERENCE: 1.0, "weight_sync": 1.0}),
        ((CRITIC_TRAINING,), {t: s.end - s.start for s in SYNC for t in [s.task]} | {CONTROLLER: 1.0}),
    ],
)
def test_a_group_waits_for_whoever_was_at_work_last_before_it(
    tasks: tuple[str, ...], expected: dict[str, float]
) -> None:
    assert waits(SYNC, tasks, 10.0) == expected


def test_of_two_that_are_waited_for_the_one_that_ends_last_counts() -> None:
    spans = (Span(ACTOR_GENERATION, 0.0, 3.0), Span(REFERENCE_INFERENCE, 1.0, 5.0), Span(ACTOR_TRAINING, 5.0, 6.0))
    assert waits(spans, (ACTOR_TRAINING,), 6.0) == {REFERENCE_INFERENCE: 4.0, ACTOR_GENERATION: 1.0}


@given(
    st.lists(
        st.tuples(st.sampled_from([ACTOR_GENERATION, REFERENCE_INFERENCE, ACTOR_TRAINING, "weight_sync"]))
        .flatmap(lambda one: st.tuples(st.just(one[0]), st.integers(0, 19), st.integers(1, 10)))
        .map(lambda one: Span(one[0], float(one[1]), float(min(20, one[1] + one[2])))),
        max_size=12,
    ),
    st.sets(st.sampled_from([ACTOR_GENERATION, REFERENCE_INFERENCE, ACTOR_TRAINING]), min_size=1),
)
def test_waits_and_work_are_the_whole_time(spans: list[Span], tasks: set[str]) -> None:
    marks = sorted({0.0, 20.0, *(one.start for one in spans), *(one.end for one in spans)})
    busy = sum(
        last - first
        for first, last in pairwise(marks)
        if any(one.owner in tasks and one.start <= first and last <= one.end for one in spans)
    )
    found = waits(spans, tasks, 20.0)
    assert sum(found.values()) + busy == pytest.approx(20.0)
    assert all(seconds > 0 for seconds in found.values())
    assert not {Span(task, 0.0, 1.0).owner for task in found} & tasks


def test_what_overlaps_of_a_task_is_one_span_and_what_goes_on_is_seen() -> None:
    timeline, start = Timeline(), time.monotonic()
    with timeline.of(ACTOR_GENERATION):
        with timeline.of(ACTOR_GENERATION):
            time.sleep(0.001)
        time.sleep(0.001)
    middle = time.monotonic()
    time.sleep(0.001)
    seconds: dict[str, float] = {}
    with timeline.timed(seconds, ACTOR_TRAINING):
        time.sleep(0.001)
        within = timeline.between(start, time.monotonic())
    assert [one.task for one in within] == [ACTOR_GENERATION, ACTOR_TRAINING]
    assert 0.0 <= within[0].start < within[0].end <= middle - start < within[1].start < within[1].end
    assert set(seconds) == {ACTOR_TRAINING}
    (later,) = timeline.between(middle, time.monotonic())
    assert later.task == ACTOR_TRAINING
    assert later.end - later.start == pytest.approx(seconds[ACTOR_TRAINING], abs=0.01)


def test_work_that_fails_ends_and_has_no_seconds() -> None:
    timeline, seconds, start = Timeline(), dict[str, float](), time.monotonic()
    with pytest.raises(ValueError, match="no"), timeline.timed(seconds, ACTOR_TRAINING):
        raise ValueError("no")
    assert seconds == {}
    (span,) = timeline.between(start, time.monotonic())
    assert span.end <= time.monotonic() - start
