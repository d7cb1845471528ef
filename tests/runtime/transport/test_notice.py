"""The notice that Slurm ends a site's job, as all members of a process hear of it."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from hetrl.runtime.transport import notice
from hetrl.runtime.transport.notice import ENDING, ends_soon

SOON_SECONDS = 20.0


def looked(directory: Path) -> None:
    """Wait until the look that is under way is over."""
    notice._looks[directory].thread.join(SOON_SECONDS)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Give the files that were looked for."""
    found, exists = list[Path](), Path.exists

    def counted(path: Path) -> bool:
        found.append(path)
        return exists(path)

    monkeypatch.setattr(Path, "exists", counted)
    return found


def test_a_thousand_members_look_once_and_all_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: list[Path]
) -> None:
    assert {ends_soon(tmp_path) for _ in range(1000)} == {False}
    looked(tmp_path)
    assert looks == [tmp_path / ENDING]
    (tmp_path / ENDING).touch()
    assert {ends_soon(tmp_path) for _ in range(1000)} == {False}  # it is not looked at all the time
    monkeypatch.setattr(notice, "LOOK_SECONDS", 0.0)
    ends_soon(tmp_path)
    looked(tmp_path)
    assert {ends_soon(tmp_path) for _ in range(1000)} == {True}
    (tmp_path / ENDING).unlink()
    assert ends_soon(tmp_path)  # nobody takes it back


def test_each_site_has_its_own(tmp_path: Path) -> None:
    for site in ("alpha", "beta"):
        (tmp_path / site).mkdir()
    (tmp_path / "beta" / ENDING).touch()
    for site in ("alpha", "beta"):
        ends_soon(tmp_path / site)
        looked(tmp_path / site)
    assert [ends_soon(tmp_path / site) for site in ("alpha", "beta")] == [False, True]


def test_a_file_server_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the heartbeat that asks, nor any other look: one that hangs is the only one of its directory."""
    back, begun = Event(), list[Path]()

    def hang(path: Path) -> bool:
        begun.append(path)
        return back.wait(SOON_SECONDS)

    monkeypatch.setattr(notice, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Path, "exists", hang)
    assert {ends_soon(tmp_path) for _ in range(100)} == {False}
    back.set()
    looked(tmp_path)
    assert ends_soon(tmp_path)
    assert begun == [tmp_path / ENDING]
