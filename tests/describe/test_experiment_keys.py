"""No key of an experiment is silent: something of the program reads each, itself or by a property made of it."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from hetrl.describe.experiment import Experiment

ROOT = Path(__file__).parents[2]
DESCRIBED = tuple(ROOT / "hetrl/describe" / name for name in ("experiment.py", "algorithm.py"))


def keys(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key below a model, with dots between."""
    models = [one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
    for model in models:
        for name, field in model.model_fields.items():
            yield from keys(field.annotation, f"{prefix}.{name}" if prefix else name)
    if not models:
        yield prefix


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


@pytest.mark.parametrize("key", sorted(set(keys(Experiment))))
def test_something_reads_the_key(key: str, read: set[str]) -> None:
    assert key.rsplit(".", 1)[-1] in read
