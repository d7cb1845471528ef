"""The library as `docs/library.md` shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hetrl
from tests.test_repository import HEAVY, ROOT

EVALUATIONS = "500"  # in the place of what the page asks for


def test_the_page_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    page = Path("docs/library.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        few = re.sub(r"evaluations=[\d_]+", f"evaluations={EVALUATIONS}", block)
        exec(compile(few, "docs/library.md", "exec"), names)
    assert "predicted" in capsys.readouterr().out
    plan, upgraded = names["plan"], names["upgraded"]
    assert isinstance(plan, hetrl.Plan) and isinstance(upgraded, hetrl.Problem)
    assert plan.inputs.keys() == {"experiment", "topology"}
    assert upgraded.digests.keys() == {"experiment"}  # the topology is no longer that of the file


def test_every_name_of_the_library_is_there_and_no_other() -> None:
    assert {name for name in hetrl.__all__ if getattr(hetrl, name).__name__ == name} == set(hetrl.__all__)
    typed = re.findall(r"(\w+) as \1", Path(hetrl.__file__).read_text())
    assert sorted(typed) == hetrl.__all__
    with pytest.raises(AttributeError, match="no attribute 'slove'"):
        _ = hetrl.slove  # type: ignore[attr-defined]


def test_importing_the_library_loads_nothing() -> None:
    code = f"import sys, hetrl; print(sorted({{'numpy', 'pydantic', 'yaml', *{HEAVY}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
