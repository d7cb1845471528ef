"""The lab by hand, without one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from lab import __main__ as by_hand, processes
from lab.shape import RUN_SITES


class SlowMachine:
    """A clock on which a lab takes 100 s to go down."""

    def __init__(self, lab: Path) -> None:
        self.now, self._lab = 0.0, lab

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += 1.0
        if self.now == 100.0:
            self._lab.rmdir()


def test_a_lab_may_take_its_time_to_go_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    monkeypatch.setattr(by_hand, "LAB", lab)
    monkeypatch.setattr(by_hand, "keeper_of", lambda _: 4321)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    monkeypatch.setattr(processes, "time", SlowMachine(lab))
    by_hand._down(argparse.Namespace())
    assert not lab.exists()


def test_sites_are_written_as_they_are_read() -> None:
    words = " ".join(by_hand._word(*site) for site in RUN_SITES.items())
    assert words == "alpha:1:a100:2 beta:1:l40s:1:second-factor gamma:1:l4:1:no-gres"
    assert by_hand._sites(words) == RUN_SITES
