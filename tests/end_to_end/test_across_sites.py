"""A training that spans sites ends soon, and says why, when one of its ranks dies.

What its other ranks say of one that dies, stands still or is cut off: tests/lab/test_training_faults.py.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from hetrl.problem import read_problem
from lab.planned.across import plan_across
from lab.planned.random_plans import write_experiment
from tests.runs import processes_of, submitted


def test_the_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    config = endless(write_experiment(tmp_path / "experiment", "sync"))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_across(read_problem(config), "data").to_json()))
    with submitted(config, tmp_path, "--plan", str(plan), "--yes") as run:
        run.until("weights_published", 2)
        rank(run.directory / "sites" / "beta", 1).kill()
        ended = run.finish()
    assert ended.code == 1
    assert "beta: actor_training rank 1 was ended by SIGKILL" in ended.stderr


def endless(config: Path) -> Path:
    """Let an experiment go on until it is ended, from its first weights."""
    document = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**document, "warm_start": None, "steps": 10_000}))
    return config


def rank(site: Path, number: int) -> psutil.Process:
    """Return the process of a rank of the actor's training at a site, by its directory."""
    words = ["--task", "actor_training", "--rank", str(number)]
    for process in processes_of(site):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            command = process.cmdline()
            if any(command[at : at + len(words)] == words for at in range(len(command))):
                return process
    raise AssertionError(f"no rank {number} in {site}")
