"""Charts, histograms and the iteration over time: positions are the numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hetrl.plan.plan import Group
from hetrl.report.chart import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    histogram,
    line_chart,
    nice_ticks,
    powers_of_ten,
    step_chart,
    tick_label,
)
from hetrl.report.gantt import Span, gantt, group_waits, measured_spans, predicted_spans, typical_step
from tests.plan.plan_cases import plan

# Charts


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12), st.integers(2, 10))
def test_ticks_enclose_the_values_and_are_few(one: float, other: float, count: int) -> None:
    low, high = sorted((one, other))
    marks = nice_ticks(low, high, count)
    slack = 1e-6 * (marks[-1] - marks[0])
    assert marks[0] <= low + slack and marks[-1] >= high - slack
    assert 2 <= len(marks) <= count + 2
    assert marks == sorted(set(marks))


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 1, [0, 0.5, 1]),
        (-3, 6, [-5, 0, 5, 10]),
        (7, 7, [2, 4, 6, 8, 10, 12]),
        (0, 4e-14, [0, 1e-14, 2e-14, 3e-14, 4e-14]),
    ],
)
def test_ticks_are_round(low: float, high: float, marks: list[float]) -> None:
    assert nice_ticks(low, high, 5) == marks


def test_tick_labels_have_the_digits_that_they_need() -> None:
    assert [tick_label(mark, [0, 0.05, 0.1]) for mark in (0, 0.05, 0.1)] == ["0.00", "0.05", "0.10"]
    assert [tick_label(mark, [0, 5e-7]) for mark in (0, 5e-7)] == ["0", "5e-7"]
    assert tick_label(1.5e6, [0, 1.5e6]) == "1.5e6"


def test_a_chart_stays_inside_and_breaks_at_gaps() -> None:
    points = [(1.0, 0.5), (2.0, 0.75), (3.0, None), (4.0, math.nan), (5.0, 1.0), (6.0, 0.25)]
    chart = line_chart("x", points)
    assert [len(line.split()) for line in chart.lines] == [2, 2]
    assert len(chart.dots) == 4
    assert all(LEFT <= x <= WIDTH - RIGHT for x, _ in chart.dots)
    assert [x for x, _ in chart.dots] == sorted(x for x, _ in chart.dots)
    assert min(chart.dots, key=lambda dot: dot[1])[0] == chart.dots[2][0]  # up is more


def test_many_points_have_no_dots() -> None:
    assert line_chart("x", [(float(x), float(x)) for x in range(1000)]).dots == ()


def test_a_log_scale_has_a_decade_per_equal_distance() -> None:
    chart = line_chart("x", [(1.0, 1e-6), (2.0, 1e-4), (3.0, 0.0), (4.0, 1e-5)], log=True)
    assert [tick.label for tick in chart.y_ticks] == ["1e-6", "1e-5", "1e-4"]
    low, high, middle = (y for _, y in chart.dots)
    assert middle == pytest.approx((low + high) / 2)
    assert [len(line.split()) for line in chart.lines] == [2]  # zero has no place on it


prices = st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.01, 1e6)), min_size=1, max_size=9).map(sorted)


@given(prices, st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)))
def test_steps_keep_their_height_up_to_the_next_point(
    points: list[tuple[float, float]], own: tuple[float, float]
) -> None:
    chart = step_chart("x", points, (*own, "this one"), "price")
    assert len(chart.dots) == len(points)
    drawn = [tuple(map(float, corner.split(","))) for line in chart.lines for corner in line.split()]
    if len(points) > 1:
        assert drawn[::2] == list(chart.dots)
        before, after = chart.dots[:-1], chart.dots[1:]
        assert drawn[1::2] == [(x, y) for (_, y), (x, _) in zip(before, after, strict=True)]
    assert chart.marked is not None and chart.marked[2] == "this one"
    for x, y in (*chart.dots, chart.marked[:2]):
        assert LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM
    assert (chart.x_ticks[0].label, chart.x_ticks[0].at, chart.y_ticks[0].at) == ("0", LEFT, HEIGHT - BOTTOM)


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_powers_of_ten_enclose_the_values_and_are_few(one: float, other: float) -> None:
    low, high = sorted((one, other))
    marks = powers_of_ten(low, high)
    assert marks[0] <= low * (1 + 1e-6) and marks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(marks) <= 8


def test_nothing_but_zeros_is_drawn_upward_from_zero() -> None:
    assert line_chart("x", [(1.0, 0.0), (2.0, 0.0)]).y_ticks[0].label == "0.0"


# Histogram


def test_the_columns_of_a_histogram_are_its_counts() -> None:
    chart = histogram("Staleness", {0: 30, 2: 10}, "versions")
    assert [(column.label, column.count) for column in chart.columns] == [
        ("0", "30 (75.0 %)"),
        ("1", "0 (0 %)"),
        ("2", "10 (25.0 %)"),
    ]
    heights = [column.height for column in chart.columns]
    assert heights[2] == pytest.approx(heights[0] / 3, abs=0.01) and heights[1] == 0
    assert all(column.top + column.height == pytest.approx(HEIGHT - BOTTOM) for column in chart.columns)
    assert chart.summary == "Staleness (versions): 30 of 0, 0 of 1, 10 of 2"


@given(st.dictionaries(st.integers(-2, 50), st.integers(0, 1000), min_size=1))
def test_a_histogram_loses_no_count_and_stays_inside(counts: dict[int, int]) -> None:
    chart = histogram("x", counts, "y")
    shown = [int(column.count.split(" ")[0].replace(",", "")) for column in chart.columns]
    assert sum(shown) == sum(counts.values())
    assert len(chart.columns) <= 10
    assert all(column.left >= LEFT and column.left + column.width <= WIDTH - RIGHT for column in chart.columns)


# The iteration over time


def test_a_synchronous_prediction_runs_phase_after_phase() -> None:
    sync = replace(plan(), algorithm=replace(plan().algorithm, mode="sync", max_staleness=0))
    assert predicted_spans(sync) == {
        "actor_generation": Span(0.0, 33.0),
        "reference_inference": Span(33.0, 35.5),
        "reward_inference": Span(33.0, 36.75),  # another group: beside the reference
        "actor_training": Span(36.75, 57.75),
        "weight_sync": Span(57.75, 58.25),
        "iteration": Span(0.0, 41.25),
    }


def test_the_weights_of_each_model_leave_behind_its_own_training() -> None:
    sync = replace(plan(), algorithm=replace(plan().algorithm, mode="sync", max_staleness=0))
    critic = {"critic_training": 30.0, "critic_weight_sync": 4.0}
    predicted = replace(sync.predicted, tasks={**sync.predicted.tasks, **critic})
    groups = (*sync.groups, Group(("critic_training",), ("c/n/0",)))
    spans = predicted_spans(replace(sync, predicted=predicted, groups=groups))
    assert spans["critic_training"] == Span(36.75, 66.75)
    assert spans["critic_weight_sync"] == Span(66.75, 70.75)
    assert spans["weight_sync"] == Span(57.75, 58.25)


def test_an_asynchronous_prediction_runs_the_groups_beside_each_other() -> None:
    spans = predicted_spans(plan())
    assert spans["actor_generation"] == Span(0.0, 33.0)
    assert spans["reward_inference"] == Span(0.0, 3.75)
    assert spans["reference_inference"] == Span(0.0, 2.5) and spans["actor_training"] == Span(2.5, 23.5)
    assert spans["weight_sync"] == Span(23.5, 24.0)


def test_measured_tasks_stand_where_they_were_at_work() -> None:
    spans = [
        ["actor_generation", 0.0, 0.5],
        ["old_logprobs", 0.25, 0.75],
        ["actor_training", 0.75, 1.5],
        ["actor_generation", 1.0, 2.0],
    ]
    assert measured_spans({"seconds": {"iteration": 2.0}, "spans": spans}) == {
        "actor_generation": (Span(0.0, 0.5), Span(1.0, 2.0)),
        "old_logprobs": (Span(0.25, 0.75),),
        "actor_training": (Span(0.75, 1.5),),
        "iteration": (Span(0.0, 2.0),),
    }


def test_waits_of_groups_are_medians_with_the_longest_reason_first() -> None:
    first, second, *others = plan().groups
    none = [{} for _ in others]
    steps = [
        [{"weight_sync": 1.0, "actor_training": 2.0}, {}, *none],
        [{"weight_sync": 3.0}, {"actor_generation": 0.001}, *none],
        [{"weight_sync": 2.0, "actor_training": 4.0}, {}, *none],
    ]
    rows = [{"step": n, "seconds": {"iteration": 10.0}, "waits": waits} for n, waits in enumerate(steps)]
    waits = group_waits(rows, plan())
    assert (waits[0].seconds, waits[0].share, waits[0].devices) == (3.0, 0.3, len(first.devices))
    assert waits[0].reasons == "weight sync 2.00 s, actor training 2.00 s"
    assert (waits[1].seconds, waits[1].reasons, waits[1].devices) == (0.0, "–", len(second.devices))
    assert group_waits([{"step": 1, "seconds": {}}], plan()) == []
    of_others = [{"step": n, "seconds": {"iteration": 99.0}, "waits": [{"actor_training": 9.0}] * n} for n in (1, 2, 4)]
    assert group_waits([*of_others, *rows], plan()) == waits
    assert group_waits(of_others, plan()) == []


def test_the_step_with_the_median_time_is_drawn() -> None:
    rows = [{"step": step, "seconds": {"iteration": seconds}} for step, seconds in ((1, 9.0), (2, 2.0), (3, 3.0))]
    assert (typical_step(rows) or {})["step"] == 3
    assert typical_step([{"step": 1}]) is None


def test_replicas_stand_below_generation_and_only_the_slowest_of_many() -> None:
    replicas = {f"jsc/actor_generation/{number}": {"seconds": 1.0 + number, "tokens": 1} for number in range(20)}
    spans = [["actor_generation", 0.0, 20.0]]
    row = {"step": 1, "seconds": {"iteration": 30.0}, "spans": spans, "replicas": replicas}
    chart = gantt(plan(), [row])
    drawn = [row for row in chart.rows if row.replica]
    assert chart.rows[1] == drawn[0] and drawn[0].name == "replica 19" and drawn[0].measured == (Span(0.0, 20.0),)
    assert len(drawn) == 12 and chart.replicas_left_out == 8
