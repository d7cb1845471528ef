"""Events and metrics: append-only lines that survive restarts, torn ends and several writers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hypothesis import given, strategies as st

from hetrl.files import EventLog, append_line, read_lines

values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
rows = st.dictionaries(st.text(), values | st.lists(values, max_size=3), max_size=4)


@given(written=st.lists(rows, max_size=5))
def test_rows_come_back_as_written(tmp_path_factory: object, written: list[dict[str, object]]) -> None:
    path: Path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"  # type: ignore[attr-defined]
    for row in written:
        append_line(path, row)
    assert list(read_lines(path)) == written


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "absent.jsonl")) == []


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2')
    assert list(read_lines(path)) == [{"step": 1}]


def test_events_are_numbered_within_their_source(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    launcher, alpha = EventLog(path, "launcher"), EventLog(path, "alpha")
    launcher.append("submitted", site="alpha", job=7)
    alpha.append("ready", rank=0)
    launcher.append("go")
    found = [(row["source"], row["sequence"], row["kind"]) for row in read_lines(path)]
    assert found == [("launcher", 0, "submitted"), ("alpha", 0, "ready"), ("launcher", 1, "go")]
    first = next(read_lines(path))
    assert list(first) == ["time", "source", "sequence", "kind", "site", "job"]
    assert (first["site"], first["job"]) == ("alpha", 7)


def test_numbering_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "other").append("x")
    for expected in range(3):
        EventLog(path, "launcher").append("start")
        assert [row for row in read_lines(path) if row["source"] == "launcher"][-1]["sequence"] == expected


def test_concurrent_writers_do_not_interleave(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"writer": index, "text": str(index) * 5000} for index in range(64)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda row: append_line(path, row), rows))
    assert sorted(read_lines(path), key=lambda row: row["writer"]) == rows


def test_a_row_is_one_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path, "launcher").append("said", text="two\nlines")
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["text"] == "two\nlines"


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    append_line(path, {"step": 3})
    assert [row["step"] for row in read_lines(path)] == [1, 3]
