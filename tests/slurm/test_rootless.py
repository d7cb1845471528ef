"""A run on one real cluster, that of an ordinary user: discovered, planned, submitted; real engines on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from lab.lab import ROOT, Lab
from lab.processes import missing_of
from lab.rootless import NODES, TOOLS, rootless_cluster
from lab.shape import JOB_USER

STEPS = 2
RUN_SECONDS = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[Mapping[str, str]]:
    if missing := missing_of(TOOLS):
        pytest.skip(f"the cluster needs {', '.join(missing)}; `make lab-setup` installs them")
    with rootless_cluster() as environment:
        yield environment


def test_the_cluster_needs_no_rights(strangers: Lab) -> None:
    """The head of a site is a machine like any other; its user has no rights there."""
    command = [sys.executable, "-m", "lab.rootless", "srun", "--nodes=2", "id", "--user", "--name"]
    done = strangers.run("alpha", command, environment={"PYTHONPATH": str(ROOT)})
    assert done.stdout.split() == [JOB_USER, JOB_USER]


def write_experiment(folder: Path) -> None:
    """Write configs/lab.yaml for one site, shortened."""
    site = {
        "name": "home",
        "ssh": "local",
        "gres": {gpu: "cpu" for gpu, _ in NODES.values()},
        "allocation": "gpu",
        "scratch": str(folder / "scratch"),
        "python": sys.executable,
        "inventory": "topology/measured/home.json",
    }
    (folder / "home.yaml").write_text(yaml.safe_dump(site))
    config = yaml.safe_load((ROOT / "configs/lab.yaml").read_text())
    config |= {"name": "home", "steps": STEPS, "topology": {"sites": ["home.yaml"]}}
    config["batch"]["samples"], config["warm_start"] = 64, None
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_discovered_planned_and_trained_by_an_ordinary_user(cluster: Mapping[str, str], tmp_path: Path) -> None:
    def hetrl(*arguments: str) -> str:
        command = [sys.executable, "-m", "launch.cli", *arguments]
        environment = {**cluster, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        logs = [f"== {path}\n{path.read_text()[-2000:]}" for path in tmp_path.glob("runs/*/logs/*/*.log")]
        assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
        return done.stdout

    write_experiment(tmp_path)
    hetrl("discover", "home.yaml")
    inventory = json.loads((tmp_path / "topology/measured/home.json").read_text())
    assert [node["gpus"] for node in inventory["nodes"]] == [{gpu: gpus} for gpu, gpus in NODES.values()]

    hetrl("submit", "config.yaml", "--yes")
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert {"megatron-core", "vllm"} <= set(summary["engines"])
    queued = subprocess.run(["squeue", "--noheader"], env=cluster, capture_output=True, text=True, check=True)
    assert queued.stdout == ""
