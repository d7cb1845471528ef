"""No key of an experiment is silent: something of the program reads each, itself or by a property made of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hetrl.describe.experiment import Experiment
from tests.describe.described_keys import Key, keys

ROOT = Path(__file__).parents[2]
DESCRIBED = tuple(ROOT / "hetrl/describe" / name for name in ("experiment.py", "algorithm.py"))


def reads(tree: ast.AST) -> set[str]:
    """Return the names of the attributes that are read."""
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.fixture(scope="module")
def read() -> set[str]:
    """The attributes that the program reads, outside of the description or through its properties and methods."""
    files = [path for room in ("hetrl", "launch") for path in (ROOT / room).rglob("*.py") if path not in DESCRIBED]
    found = set[str]().union(*(reads(ast.parse(path.read_text())) for path in files))
    nodes = [node for path in DESCRIBED for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    for _ in functions:  # a property may read another
        found |= set[str]().union(*(reads(function) for function in functions if function.name in found))
    return found


@pytest.mark.parametrize("key", sorted(set(keys(Experiment)), key=str), ids=lambda key: ".".join(map(str, key)))
def test_something_reads_the_key(key: Key, read: set[str]) -> None:
    assert key[-1] in read
