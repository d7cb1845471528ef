"""What faults cost: closed forms, and that nothing is counted twice."""

from __future__ import annotations

import math
import statistics
from itertools import accumulate, chain
from typing import Any

from hypothesis import given, strategies as st

from hetrl.goodput import fault_costs, goodput


def rows_of(spans: list[float], faults: list[list[str]]) -> list[dict[str, Any]]:
    """Steps that end one after the other, of which each says that it took a second."""
    ends = accumulate(spans)
    return [
        {"step": number, "elapsed_seconds": end, "seconds": {"iteration": 1.0}, **({"faults": those} if those else {})}
        for number, (end, those) in enumerate(zip(ends, faults, strict=True), 1)
    ]


def test_a_fault_costs_what_the_steps_that_it_touched_were_late() -> None:
    rows = rows_of([60, 2, 2, 14, 2, 5, 3, 2], [[], [], [], ["resumed"], [], ["replica", "link"], ["replica"], []])
    found = {one.what: (one.step, one.seconds) for one in fault_costs(rows)}
    assert found == {"resumed": (4, 12.0), "replica": (6, 1.5 + 1.0), "link": (6, 1.5)}
    assert goodput(rows, 80.0) == 0.1


def test_the_start_is_no_part_of_what_a_fault_in_the_first_step_costs() -> None:
    rows = rows_of([60, 1, 1], [["link"], [], []])
    assert [one.seconds for one in fault_costs(rows)] == [0.0]


def test_rows_that_say_no_time_have_their_own_seconds() -> None:
    rows = [{"step": n, "seconds": {"iteration": 2.0 if n == 2 else 1.0}, "faults": ["a"] * (n == 2)} for n in (1, 2)]
    assert [one.seconds for one in fault_costs(rows)] == [1.0]


@given(st.lists(st.tuples(st.floats(0.1, 100), st.lists(st.sampled_from("abc"), unique=True)), min_size=1, max_size=30))
def test_no_second_is_counted_twice(steps: list[tuple[float, list[str]]]) -> None:
    spans, faults = [1.0, *(span for span, _ in steps[1:])], [those for _, those in steps]  # the first says a second
    costs = fault_costs(rows_of([span for span, _ in steps], faults))
    free = [span for span, those in zip(spans, faults, strict=True) if not those]
    usual = statistics.median(free or spans)
    late = [max(span - usual, 0.0) for span, those in zip(spans, faults, strict=True) if those]
    assert [one.what for one in costs] == list(dict.fromkeys(chain(*faults)))
    assert all(one.seconds >= 0 for one in costs)
    assert math.fsum(one.seconds for one in costs) <= math.fsum(late) + 1e-6
