"""Prompt sources are pure functions of seed and index; files fail with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetrl.config import Data
from hetrl.errors import UsageError
from hetrl.runtime.data import arithmetic, json_lines, larger_digit, open_source
from hetrl.runtime.rewards import exact_match

seeds = st.integers(0, 2**31)
indices = st.integers(0, 10**6)


@given(seeds, indices)
def test_larger_digit_has_the_larger_of_two_different_digits(seed: int, index: int) -> None:
    prompt = larger_digit(seed)(index)
    first, second = int(prompt.text[0]), int(prompt.text[2])
    assert first != second
    assert prompt.text == f"{first} {second}>"
    assert prompt.answer == str(max(first, second))
    assert prompt == larger_digit(seed)(index)


@given(seeds, indices)
def test_arithmetic_has_the_sum(seed: int, index: int) -> None:
    prompt = arithmetic(seed)(index)
    first, second = prompt.text.rstrip("=").split("+")
    assert int(first) + int(second) == int(prompt.answer)
    assert len(first) == len(second) == 2


def test_seeds_differ() -> None:
    assert [larger_digit(0)(n) for n in range(20)] != [larger_digit(1)(n) for n in range(20)]


def test_json_lines_visits_every_row_once_per_pass_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "q{n}", "answer": {n}}}\n' for n in range(10)))
    source = json_lines(path, seed=3)
    first, second = ([source(epoch * 10 + n) for n in range(10)] for epoch in range(2))
    assert sorted(row.answer for row in first) == sorted(row.answer for row in second) == [str(n) for n in range(10)]
    assert first != second
    assert first == [json_lines(path, seed=3)(n) for n in range(10)]


@pytest.mark.parametrize("line", ["{", '{"prompt": "q"}', "[1, 2]", "3"])
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "q", "answer": "a"}\n\n' + line + "\n")
    with pytest.raises(UsageError, match=r"rows\.jsonl:3: expected"):
        json_lines(path, seed=0)


def test_sources_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="planned for but not read yet"):
        open_source(Data(kind="gsm8k", path="/data/gsm8k"))
    with pytest.raises(UsageError, match="needs the path"):
        open_source(Data(kind="jsonl"))
    with pytest.raises(UsageError, match="No such file"):
        open_source(Data(kind="jsonl", path=str(tmp_path / "none.jsonl")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no rows"):
        open_source(Data(kind="jsonl", path=str(tmp_path / "empty.jsonl")))


@pytest.mark.parametrize(
    ("response", "answer", "reward"), [("7", "7", 1.0), (" 7\n", "7", 1.0), ("77", "7", 0.0), ("", "7", 0.0)]
)
def test_exact_match(response: str, answer: str, reward: float) -> None:
    assert exact_match(response, answer) == reward
