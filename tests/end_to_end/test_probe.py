"""Measuring with the local executor: the sites of the quickstart, as processes of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from hetrl.describe.measured_files import read_file
from hetrl.describe.measured_links import MeasuredLinks
from hetrl.problem import read_problem
from lab.quickstart import changed
from tests.runs import ROOT

SITES = [str(ROOT / "topology" / "sites" / f"{site}.yaml") for site in ("alpha", "beta")]
LINKS = str(ROOT / "topology" / "quickstart-links.yaml")


def hetrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def links_of(directory: Path) -> str:
    """Write the link of both sites alone; returns the file's name."""
    written = [link for link in yaml.safe_load(Path(LINKS).read_text())["links"] if "gamma" not in link["between"]]
    path = directory / "links.yaml"
    path.write_text(yaml.safe_dump({"links": written}))
    return str(path)


def test_links_are_measured_and_planned_with(tmp_path: Path) -> None:
    out = tmp_path / "measured"
    topology = {"sites": SITES, "links": links_of(tmp_path), "measured": [str(out)]}
    config = changed(tmp_path, topology=topology)
    done = hetrl("probe", str(config), "--seconds", "2", "--streams", "2", "--round-trips", "5", "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.iterdir()
    measured = read_file(path)
    assert isinstance(measured, MeasuredLinks)
    assert [(one.source, one.target) for one in measured.links] == [("alpha", "beta"), ("beta", "alpha")]
    assert all(one.best.gbps > 0 and len(one.round_trip_ms) == 5 for one in measured.links)
    (link,) = read_problem(config).topology.links
    assert link.gbps == min(one.best.gbps for one in measured.links)
