"""A training that spans sites ends soon, and says why, when one of its ranks stands still or dies."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
import yaml

from hetrl.problem import read_problem
from lab.planned.across import plan_across
from lab.planned.random_plans import write_experiment
from tests.runs import submitted


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSTOP, "beta: beta/actor_training.rank/1 has been silent for 12 s (its last word: in "),
        (signal.SIGKILL, "beta: actor_training rank 1 was ended by SIGKILL"),
    ],
)
def test_the_rank_that_is_gone_is_named_by_all_others(number: signal.Signals, said: str, tmp_path: Path) -> None:
    config = endless(write_experiment(tmp_path / "experiment", "sync"))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_across(read_problem(config), "data").to_json()))
    with submitted(config, tmp_path, "--plan", str(plan), "--yes") as run:
        run.until("weights_published", 2)
        rank(run.directory / "sites" / "beta", 1).send_signal(number)
        ended = run.finish()
    assert ended.code == 1
    assert said in ended.stderr
    if number == signal.SIGSTOP:
        assert "beta/actor_training.rank/1" in (ended.directory / "logs/alpha/actor_training-0.log").read_text()


def endless(config: Path) -> Path:
    """Let an experiment go on until it is ended, from its first weights."""
    document = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**document, "warm_start": None, "steps": 10_000}))
    return config


def rank(site: Path, number: int) -> psutil.Process:
    """Return the process of a rank of the actor's training at a site, by its directory."""
    words = ["--task", "actor_training", "--rank", str(number)]
    for process in psutil.process_iter():
        try:
            command, directory = process.cmdline(), process.environ().get("HETRL_SITE_DIRECTORY")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if (
            directory
            and Path(directory).resolve() == site.resolve()
            and any(command[at : at + len(words)] == words for at in range(len(command)))
        ):
            return process
    raise AssertionError(f"no rank {number} in {site}")
