"""Lines of samples that wait, against all of them put in order anew."""

from __future__ import annotations

from hypothesis import given, strategies as st

from hetrl.waiting import Waiting, Waits, alike, longest

WAITS = st.tuples(st.booleans(), st.integers(0, 9).map(float), st.just(False), st.integers(-9, 0), st.just((0, 0)))
PUTS = st.lists(
    st.tuples(
        st.integers(0, 3), st.dictionaries(st.integers(0, 2), st.tuples(st.booleans(), st.integers(0, 3)), max_size=3)
    ),
    max_size=20,
)


@given(waits=st.lists(WAITS, max_size=12), most=st.one_of(st.integers(-1, 10).map(float), st.just(float("inf"))))
def test_what_lacks_too_much_is_left_for_others(waits: list[Waits], most: float) -> None:
    line = sorted(waits)
    assert longest(line, most) == next((one for one in reversed(line) if one[1] <= most), None)


@given(st.lists(WAITS, min_size=1, max_size=12), st.integers(0, 11))
def test_what_lacks_as_much_stands_ahead(waits: list[Waits], place: int) -> None:
    line = sorted(set(waits))
    first = line[place % len(line)]
    ahead = [one for one in line if one <= first and one[:2] == first[:2]]
    assert [*alike(line, first)] == ([first] if first[0] else [*reversed(ahead)])


@given(PUTS)
def test_a_line_has_what_was_put_there_last_in_order(puts: list[tuple[int, dict[int, tuple[bool, int]]]]) -> None:
    waiting, plain = Waiting(), dict[int, list[Waits]]()
    for prompt, samples in puts:
        waits = [(unknown, float(lacks), False, -prompt, (prompt, k)) for k, (unknown, lacks) in samples.items()]
        waiting.put(prompt, prompt % 2, waits)
        plain[prompt] = waits
        lines = {batch: sorted(one for p in plain if p % 2 == batch for one in plain[p]) for batch in (0, 1)}
        assert [(batch, [*line]) for batch, line in waiting.lines()] == [one for one in lines.items() if one[1]]
        assert bool(waiting) == any(plain.values())
        asked = {1, 2, 7}
        found = [one for batch in (0, 1) for one in waiting.of(asked, batch)]
        assert sorted(found) == sorted(one for p in asked & plain.keys() for one in plain[p])
