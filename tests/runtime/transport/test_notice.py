"""The notice that Slurm ends a site's job, as all members of a process hear of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hetrl.runtime.transport import notice
from hetrl.runtime.transport.notice import ENDING, ends_soon


def test_a_thousand_members_look_once_and_all_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[Path]()
    exists = Path.exists

    def counted(path: Path) -> bool:
        looks.append(path)
        return exists(path)

    async def told() -> set[bool]:
        return {*await asyncio.gather(*(ends_soon(tmp_path) for _ in range(1000)))}

    monkeypatch.setattr(Path, "exists", counted)
    assert asyncio.run(told()) == {False}
    assert looks == [tmp_path / ENDING]
    (tmp_path / ENDING).touch()
    assert asyncio.run(told()) == {False}  # it is not looked at all the time
    monkeypatch.setattr(notice, "LOOK_SECONDS", 0.0)
    assert True in asyncio.run(told())
    assert asyncio.run(told()) == {True}
    (tmp_path / ENDING).unlink()
    assert asyncio.run(told()) == {True}  # nobody takes it back


def test_each_site_has_its_own(tmp_path: Path) -> None:
    for site in ("alpha", "beta"):
        (tmp_path / site).mkdir()
    (tmp_path / "beta" / ENDING).touch()
    assert [asyncio.run(ends_soon(tmp_path / site)) for site in ("alpha", "beta")] == [False, True]
