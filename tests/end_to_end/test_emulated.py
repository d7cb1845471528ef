"""Runs whose engines are emulated: everything else is what it is in a run that trains."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hetrl.errors import TimeUpError
from hetrl.runtime.transport.notice import ENDING
from lab.lab import ROOT
from lab.planned.runs import samples_of
from tests.runs import Finished, Submitted, drew_again, events_of, processes_of, started, submit, submitted

STEPS = 4
LATE = "gamma/actor_generation/1"


def experiment(name: str, work: Path, **launch: Any) -> Path:
    """Write an experiment of configs/ with emulated engines and few steps."""
    document = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    del document["warm_start"]
    document["launch"] |= {"engines": "emulated", "emulation": {"speed": 2.0}, **launch}
    document |= {"steps": STEPS, "planner": {"budget_seconds": 2}, "checkpoints": {"every_steps": 2}}
    if weights := document["reward"].get("weights"):
        document["reward"] |= dict.fromkeys(("weights", "architecture"), str(ROOT / weights))
    work.mkdir(parents=True, exist_ok=True)
    path = work / "emulated.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """PPO with a critic and a reward model."""
    work = tmp_path_factory.mktemp("ppo")
    return submit(experiment("quickstart-ppo", work), work)


def test_every_task_of_ppo_has_its_turn_and_takes_the_time_that_it_is_told_to(ppo: Finished) -> None:
    assert ppo.code == 0, ppo.stderr
    summary = ppo.summary()
    assert (summary["steps"], summary["engines"]) == (STEPS, {"training": "emulated", "rollouts": "emulated"})
    for task in ("reward_inference", "critic_inference", "actor_training", "critic_training"):
        seconds = summary["tasks"][task]
        assert seconds["measured_seconds"] > 0.8 * seconds["predicted_seconds"] / 2, f"{task}: at twice the speed"


def test_versions_are_proven_at_replicas_and_differ_as_those_of_a_training_do(ppo: Finished) -> None:
    versions = ppo.summary()["weight_versions"]
    assert len(versions) == STEPS + 1
    assert len(set(ppo.digests())) == len(versions)
    later = versions[2:]  # the first ones reach replicas that have none
    assert all(0 < row["delta_bytes"] < row["bytes"] / 10 and 0.005 < row["changed"] < 0.02 for row in later)


def test_an_asynchronous_run_is_as_stale_as_it_may_be(tmp_path: Path) -> None:
    run = submit(experiment("quickstart-async", tmp_path), tmp_path)
    assert run.code == 0, run.stderr
    assert {row["staleness"] for row in run.rows()} == {0, 1}


def test_async_without_staleness_is_the_same_run(tmp_path: Path) -> None:
    """The same seed gives the same samples, rewards and versions in both modes."""
    found = []
    for mode in ({"mode": "sync"}, {"mode": "async", "max_staleness": 0}):
        config = experiment("quickstart", tmp_path / mode["mode"])
        document = yaml.safe_load(config.read_text())
        document |= {"algorithm": document["algorithm"] | mode, "rollouts": {"kept": True}}
        config.write_text(yaml.safe_dump(document))
        run = submit(config, config.parent)
        assert run.code == 0, run.stderr
        found.append((samples_of(run.directory), [row["reward"] for row in run.rows()], run.digests()))
    assert found[0] == found[1]
    assert sorted(found[0][0]) == [*range(1, STEPS + 1)]


def test_a_run_begins_without_a_site_that_comes_late(tmp_path: Path) -> None:
    config = experiment("quickstart", tmp_path, start_with=1)
    document = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(document | {"steps": 1000}))
    with submitted(config, tmp_path) as run:
        while not (late := emulated(run)):
            time.sleep(0.05)
        late.suspend()
        run.until("step", 2)
        assert not run.events("replica_joined")
        late.resume()
        run.until("replica_joined", 1)
        joined = len(run.events("step"))
        while not (drew := drew_again(run.directory, LATE, joined)):
            run.until("step", len(run.events("step")) + 1)
        run.interrupt()
        rows = run.finish().rows()
    (go,) = run.events("go")
    assert go["absent"] == [LATE]
    assert not any(LATE in row["replicas"] for row in rows[:2]) and drew
    assert not run.events("replica_lost")


def emulated(run: Submitted) -> psutil.Process | None:
    """Return the process that has the ranks and replicas of gamma, before it is ready."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied, AssertionError, IndexError):
        found = processes_of(run.directory / "sites" / "gamma")
        return next((one for one in found if "hetrl.runtime.emulated.site" in one.cmdline()), None)
    return None


def test_a_run_goes_on_where_another_one_was_cancelled(tmp_path: Path) -> None:
    config = experiment("quickstart", tmp_path)
    document = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(document | {"steps": 40}))
    with submitted(config, tmp_path) as first:
        first.until("checkpoint", 1)
    config.write_text(yaml.safe_dump(document | {"steps": 12}))
    with started(tmp_path, "resume", first.directory.name, "--config", str(config)) as then:
        run = then.finish()
    assert run.code == 0, run.stderr
    assert [row["step"] for row in run.rows()] == [*range(1, 13)]
    (resumed,) = (event for event in then.events("resumed"))
    assert resumed["step"] in range(2, 12, 2), "where a checkpoint was"


def test_a_run_whose_time_is_up_keeps_its_step_and_is_taken_up_again_as_one_that_lost_a_process_is(
    tmp_path: Path,
) -> None:
    config = experiment("quickstart", tmp_path, restarts=2)
    document = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(document | {"steps": 14, "checkpoints": {"every_steps": 1000}}))
    with submitted(config, tmp_path) as launcher:
        launcher.until("step", 3)
        first = launcher.directory
        (first / "sites" / "beta" / ENDING).touch()  # as the script of a job does
        second = launcher.next_directory(first)
        launcher.until("step", 2)
        for process in processes_of(second / "sites" / "alpha"):
            process.kill()
        third = launcher.next_directory(second)
        run = launcher.finish()
    assert run.code == 0, run.stderr
    assert [row["step"] for row in run.rows()] == [*range(1, 15)]
    (ending,), failed = events_of(first, "ending"), events_of(first, "failed")[0]
    assert failed["exit_code"] == TimeUpError.exit_code
    assert f"beta: Slurm ends its job; kept up to step {ending['step']} of 14" in run.stderr
    for directory in (second, third):  # nothing that was trained before is lost
        assert [event["step"] for event in events_of(directory, "resumed")] == [ending["step"]]
