"""A probe at three sites of this machine, one of which falls silent while the links are measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from hetrl.describe.sites import SiteFile
from hetrl.runtime.instruments.probe import GO_FILE, LINKS_FILE, READY_FILE, Links
from lab.processes import wait_until
from launch.measure import stage as measure_stage
from launch.measure.remote_task import LOCAL
from launch.measure.stage import Wanted, stage
from tests.launch.launch_cases import ROOT

SITES = ("alpha", "beta", "gamma")
WANTED = Wanted(links=True, nodes=False, gpus=False, streams=(1,), seconds=2.0, round_trips=3, wait_seconds=60.0)
PROGRAM = [sys.executable, "-m", "hetrl.runtime.instruments.probe"]
SECONDS = 120.0


def test_the_pairs_without_a_site_that_falls_silent_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_stage, "MEET_SECONDS", 3.0)  # of silence
    sites = stage("probe-1", [SiteFile(name=name) for name in SITES], LOCAL, tmp_path, WANTED)
    places = {site.name: site.here for site in sites}
    written = places["alpha"] / LINKS_FILE
    with ExitStack() as stack:
        probes = {}
        for name, place in places.items():
            log = stack.enter_context((place / "probe.log").open("w"))
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            probes[name] = stack.enter_context(subprocess.Popen(PROGRAM, cwd=place, stderr=log, env=environment))
            stack.callback(probes[name].kill)
        wait_until(lambda: all((place / READY_FILE).exists() for place in places.values()), SECONDS, lambda: "ready")
        for place in places.values():
            (place / GO_FILE).write_text(json.dumps(SITES))
        wait_until(written.exists, SECONDS, lambda: (places["alpha"] / "probe.log").read_text())
        probes["gamma"].send_signal(signal.SIGSTOP)

        def found() -> tuple[set[tuple[str, str]], dict[str, str]]:
            links = msgspec.json.decode(written.read_bytes(), type=Links)
            return {(one.source, one.target) for one in links.links}, {one.what: one.why for one in links.skipped}

        wait_until(lambda: ("beta", "alpha") in found()[0], SECONDS, lambda: str(found()))
        assert "alpha -> gamma: no connection for 3 s" in found()[1]["alpha -> gamma"]
