"""A rehearsal as a user asks for it: of an experiment on 64 GPUs in eight regions, none of which is here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lab.lab import ROOT
from tests.runs import assert_nothing_left


def rehearse(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (work / "topology").symlink_to(ROOT / "topology")
    command = [sys.executable, "-m", "launch.cli", "rehearse", *arguments]
    return subprocess.run(command, cwd=work, text=True, capture_output=True, timeout=600)


def test_eight_regions_are_rehearsed_on_one_machine(tmp_path: Path) -> None:
    config = str(ROOT / "configs/paper-multi-continent.yaml")
    done = rehearse(tmp_path, config, "--steps", "2", "--speed", "40", "--json")
    assert done.returncode == 0, done.stderr
    assert "0.00024 of the bytes" in done.stderr
    assert "a token counts as 2" in done.stderr, "of 1,024 samples of up to 2,048 tokens"
    found = json.loads(done.stdout)
    assert (found["steps"], found["counted_steps"]) == (2, 1)
    assert {"model.weights", "data"} <= {line.split(":")[0] for line in found["findings"]}
    # No engine is faster than it is told to be; how much slower the rest makes it, this machine decides.
    for task in ("reference_inference", "reward_inference", "critic_inference", "actor_training", "critic_training"):
        seconds = found["tasks"][task]
        assert seconds["rehearsed_seconds"] > 0.8 * seconds["predicted_seconds"] > 0, task
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["run"] == found["run"] == run.name
    assert_nothing_left(run)


def test_the_table_fits_a_terminal(tmp_path: Path) -> None:
    done = rehearse(tmp_path, str(ROOT / "configs/quickstart.yaml"), "--steps", "2", "--speed", "1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines and max(map(len, lines)) <= 80
    assert any("iteration" in line for line in lines)
    assert "found: warm_start" in done.stderr
