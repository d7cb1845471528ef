"""The compiled core: what it shares with Python, how it is compiled, and that no index of it is out of range."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hetrl.errors import HetrlError
from hetrl.search.core import build, functions as core
from hetrl.search.core.records import Flags1, Floats2, Ints1, declare, pack, records_in

SEARCH = """
import sys
sys.path.insert(0, {root!r})
from tests.search.ilp_cases import problem
from hetrl.search.evaluate import Evaluator
from hetrl.search.ilp.columns import make_columns
from hetrl.search.ilp.options import read_menu
from hetrl.search.limits import Limits
from hetrl.search.sha_ea import search
from hetrl.search.space import Space
space, never = Space(problem(3, {algorithm!r}, {mode!r})), float("inf")
for narrow in (False, True):
    evaluator = Evaluator(space, narrow)
    found = search(evaluator, Limits(never, 3000), 5)
    print(found.seconds)
limit = 1.05 * found.seconds
print(make_columns(read_menu(evaluator, limit, never), evaluator.tables, limit, never).numbers.sum())
"""


class Inner(NamedTuple):
    flags: Flags1


class Outer(NamedTuple):
    count: int
    share: float
    table: Floats2
    inner: Inner


def test_a_named_tuple_is_declared_field_by_field() -> None:
    assert declare(Outer) == (
        "struct Outer {\n    Int count;\n    double share;\n    Array<double, 2> table;\n    Inner inner;\n};\n"
    )
    assert records_in(Outer) == [Inner, Outer]


@pytest.mark.parametrize(
    "table",
    [np.zeros(4), np.zeros((2, 2), np.int64), np.zeros((4, 4))[:, ::2]],
    ids=["dimensions", "type", "strides"],
)
def test_an_array_that_is_not_as_its_field_says_is_refused(table: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"Outer\.table: .* where the core wants float64\[2\]"):
        pack(Outer(1, 0.5, table, Inner(np.zeros(3, np.bool_))))


def test_the_core_sees_what_python_writes_and_python_what_the_core_writes() -> None:
    rows = np.array([[1.0, 2.0], [2.0, 3.0], [0.0, 9.0], [1.0, 2.0]])
    order, places = np.array([0, 1, 2, 3]), np.zeros(4, np.int64)
    assert core.undominated(rows, order, places) == 2
    assert places[:2].tolist() == [0, 2]
    rows[0] = 5.0
    assert core.undominated(rows, order, places) == 4
    assert places.tolist() == [0, 1, 2, 3]


def test_a_wrong_argument_is_refused_before_the_core_reads_it() -> None:
    places: Ints1 = np.zeros(4, np.int64)
    with pytest.raises(TypeError, match=r"int64\[1\] where the core wants float64\[2\]"):
        core.undominated(places, places, places)
    with pytest.raises(ValueError, match="shorter"):
        core.undominated(np.zeros((4, 2)), places)  # type: ignore[call-arg]


@pytest.mark.parametrize(("algorithm", "mode"), [("ppo", "async"), ("grpo", "sync")])
def test_no_index_is_out_of_range(algorithm: str, mode: str) -> None:
    """With every index checked (an abort where one is wrong) the searches find the same plans."""
    program = SEARCH.format(root=str(Path(__file__).parents[2]), algorithm=algorithm, mode=mode)

    def found(environment: dict[str, str]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert found({build.CHECKED: "1"}) == found({build.CHECKED: ""})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources of which nothing is compiled yet, and an empty cache of the user's."""
    sources = tmp_path / "cpp"
    sources.mkdir()
    for path in build.SOURCES.iterdir():
        if path.is_file():
            (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "FLAGS", [flag for flag in build.FLAGS if flag not in build.OPTIMISED])  # sooner
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_it_is_compiled_once_for_each_state_of_the_sources(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.load(core.header())
    (made,) = (elsewhere / "cpp" / "__pycache__").iterdir()
    monkeypatch.setenv("CXX", "/nowhere/c++")  # not asked
    build.load(core.header())
    with pytest.raises(HetrlError, match=r"/nowhere/c\+\+: No such file .* CXX="):
        build.load(core.header() + "// another one\n")
    assert [*made.parent.iterdir()] == [made]


def test_where_the_sources_cannot_be_written_the_users_cache_has_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).parent != build.SOURCES)  # root writes anywhere
    build.load(core.header())
    assert len([*(elsewhere / "cache" / "hetrl").glob("core-*.so")]) == 1


def test_without_a_compiler_it_says_how_to_get_one(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(elsewhere))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HetrlError, match=r"no C\+\+ compiler .*module load gcc"):
        build.load(core.header())


def test_what_the_compiler_says_is_passed_on(elsewhere: Path) -> None:
    (build.SOURCES / "search.cpp").write_text("#error too old\n")
    with pytest.raises(HetrlError, match="does not compile the search .* #error too old"):
        build.load(core.header())


def test_a_file_of_another_machine_is_named(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = elsewhere / "c++"
    other.write_text('#!/bin/sh\nfor last; do :; done\necho "of another machine" > "$last"\n')
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    with pytest.raises(HetrlError, match=r"core-[0-9a-f]+\.so: .* Remove it and try again"):
        build.load(core.header())
