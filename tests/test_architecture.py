"""The rooms of the program and who may import whom, as docs/architecture.md says; its walks name what is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PROGRAM = ("hetrl", "launch")
BASICS = "hetrl/*.py"  # may be imported everywhere
ALONE = (
    "hetrl/__init__.py",
    "hetrl/library.py",
    "hetrl/problem.py",
    "launch/cli.py",
)  # files that are a row of their own
MOST_FILES = 20

Graph = Mapping[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """The files of the program by their dotted names; a package is its `__init__`."""
    found = {}
    for package in PROGRAM:
        for path in sorted((root / package).rglob("*.py")):
            found[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@cache
def imports_between_files(root: Path) -> Graph:
    """Which files import which, wherever in a file they do; the package above a file does not count."""
    known = modules(root)
    return {name: {target for target in imported(path, known) if target != name} for name, path in known.items()}


def imported(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield from ([inside] if inside in known else [node.module] if node.module in known else [])


def circles(graph: Graph) -> list[list[str]]:
    """Every way from a node back to itself that a search in depth meets."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> None:
        if node in way:
            found.append([*way[way.index(node) :], node])
        elif node not in done:
            for target in sorted(graph.get(node, ())):
                visit(target, [*way, node])
            done.add(node)

    for node in graph:
        visit(node, [])
    return found


def room_of(path: Path) -> str:
    """The row of the table that a file belongs to: its folder, two levels deep in the runtime, else one."""
    name = path.relative_to(ROOT).as_posix()
    if name in ALONE:
        return name
    parts = name.split("/")[:-1]
    if len(parts) == 1:
        return BASICS if parts == ["hetrl"] else f"{parts[0]}/*.py"
    return "/".join(parts[: 3 if parts[1] == "runtime" else 2])


def table() -> dict[str, list[str]]:
    """The table of the page: room -> the rooms that it may import, in the order of the page."""
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    return {room: re.findall(r"`([^`]+)`", allowed) for room, allowed in rows}


@cache
def imports_between_rooms() -> dict[str, set[str]]:
    known, found = modules(ROOT), {}
    for name, targets in imports_between_files(ROOT).items():
        room = room_of(known[name])
        found.setdefault(room, set()).update({room_of(known[target]) for target in targets} - {room, BASICS})
    return found


def test_every_room_has_a_row_and_every_row_a_room() -> None:
    assert set(table()) == set(imports_between_rooms())


@pytest.mark.parametrize("room", sorted(imports_between_rooms()))
def test_a_room_imports_what_the_table_says(room: str) -> None:
    """Nothing else, and all of it: a permission that nobody needs is no permission."""
    assert set(table()[room]) == imports_between_rooms()[room]


def test_a_room_imports_only_rooms_above_it() -> None:
    above: list[str] = []
    for room, allowed in table().items():
        assert set(allowed) <= set(above), f"{room} imports a room below it"
        above.append(room)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(imports_between_files(ROOT)) == []


def test_a_circle_is_found_wherever_the_import_stands(tmp_path: Path) -> None:
    package = tmp_path / "hetrl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from hetrl.b import x\n")
    (package / "b.py").write_text("def f():\n    from hetrl import c\n")
    (package / "c.py").write_text("if TYPE_CHECKING:\n    import hetrl.a\n")
    assert [set(circle) for circle in circles(imports_between_files(tmp_path))] == [{"hetrl.a", "hetrl.b", "hetrl.c"}]


def folders() -> Iterable[Path]:
    kept = {path.parent for package in (*PROGRAM, "lab") for path in (ROOT / package).rglob("*") if path.is_file()}
    return sorted(folder for folder in kept if "__pycache__" not in folder.parts)


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    sizes = {
        str(folder.relative_to(ROOT)): sum(path.is_file() and path.name != "__init__.py" for path in folder.iterdir())
        for folder in folders()
    }
    assert {name: size for name, size in sizes.items() if size > MOST_FILES} == {}


def test_the_walks_name_what_is_there() -> None:
    """Each link of the walks, [`name`](../path), is a function, method or class of that file."""
    links = re.findall(r"\[`([\w.]+)(?:\(\))?`\]\(\.\./([^)]+)\)", PAGE.read_text())
    assert len(links) > 30
    missing = [f"{path}: {name}" for name, path in links if not _defines(ROOT / path, name.rpartition(".")[2])]
    assert missing == []


def _defines(path: Path, name: str) -> bool:
    if path.suffix == ".py":
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return any(isinstance(node, kinds) and node.name == name for node in ast.walk(ast.parse(path.read_text())))
    return re.search(rf"\b{name}\b\(", path.read_text()) is not None
