"""Asynchronous mode without staleness is the synchronous run, to the last bit of every weight version."""

from __future__ import annotations

from pathlib import Path

from lab.quickstart import changed
from tests.runs import submit

STEPS = 4


def test_async_without_staleness_gives_the_weights_of_the_synchronous_run(tmp_path: Path) -> None:
    modes = {}
    for mode in ("sync", "async"):
        config = changed(tmp_path / mode, algorithm={"mode": mode, "max_staleness": 0}, steps=STEPS)
        modes[mode] = submit(config, tmp_path / mode)
        assert modes[mode].code == 0, modes[mode].stderr
    digests = modes["sync"].digests()
    assert len(digests) > STEPS
    assert len(set(digests)) == len(digests)
    assert modes["async"].digests() == digests
