"""GPUs of a site's rollouts are given back while a run goes on, and taken again."""

from __future__ import annotations

import json
import os

import pytest

from hetrl.files import read_lines
from hetrl.runtime.run.deaths import released_at
from launch.cli import main
from launch.run_directory import Run
from tests.launch.slurm.slurm_cases import Clusters

MEMBERS = ["alpha/actor_training/0", "beta/actor_generation/0", "gamma/actor_generation/1"]


@pytest.fixture
def clusters(submitted: Clusters) -> Clusters:
    """A run that has begun."""
    submitted.control(submitted.runs()[0], "go", members=MEMBERS)
    return submitted


@pytest.fixture
def run(clusters: Clusters) -> Run:
    return clusters.runs()[0]


def jobs_of(run: Run, site: str) -> dict[str, tuple[str, str]]:
    """Return the id and the state of a site's jobs, as the run's state has them."""
    assert main(["status", run.id]) == 0
    jobs = json.loads(run.state.read_text())["jobs"]
    return {job["name"]: (job["id"], job["state"]) for job in jobs if job["site"] == site}


def test_rollouts_that_are_released_are_cancelled_and_come_back_as_jobs_of_the_same_scripts(
    clusters: Clusters, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["release", "beta", run.id]) == 0
    assert f"beta: 2 jobs cancelled; {run.id} goes on without its rollouts" in capsys.readouterr().out
    assert clusters.states() == {"alpha": ["RUNNING"], "beta": ["CANCELLED"] * 2, "gamma": ["RUNNING"]}
    assert released_at(clusters.directory(run, "alpha")) == {"beta"}, "or the controller would take it for a fault"
    ends = clusters.directory(run, "beta") / "ended"
    ends.mkdir(exist_ok=True)
    (ends / "array-cpu.0").touch()
    assert main(["add", "beta", run.id]) == 0
    assert f"beta: 2 jobs submitted; their rollouts join {run.id} when they start" in capsys.readouterr().out
    assert clusters.states()["beta"] == ["CANCELLED"] * 2 + ["RUNNING"] * 2
    assert not list(ends.iterdir()), "or the gateway would take its rollouts for ended"
    assert not released_at(clusters.directory(run, "alpha"))
    assert jobs_of(run, "beta") == {"gang": ("3", "RUNNING"), "array-cpu": ("4", "RUNNING")}
    clusters.turn("beta", "COMPLETED")
    assert jobs_of(run, "beta") == {"gang": ("3", "COMPLETED"), "array-cpu": ("4", "COMPLETED")}


def test_nothing_that_lives_is_submitted_twice(
    clusters: Clusters, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["add", "beta", run.id]) == 0
    assert "beta: its rollouts have not ended: " in capsys.readouterr().out
    assert clusters.submissions("beta") == 2
    assert main(["release", "beta", run.id]) == 0
    assert [main(["add", "beta", run.id]) for _ in range(2)] == [0, 0]
    assert clusters.submissions("beta") == 4


def test_a_site_that_refuses_its_jobs_is_quoted_and_none_of_them_is_left(
    clusters: Clusters, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["release", "beta", run.id]) == 0
    clusters.fault("beta", "sbatch", "refuse-array")
    assert main(["add", "beta", run.id]) == 1
    assert "beta: array-cpu was not accepted: Batch job submission failed" in capsys.readouterr().err
    assert clusters.states() == {"alpha": ["RUNNING"], "beta": ["CANCELLED"] * 3, "gamma": ["RUNNING"]}
    clusters.fault("beta", "sbatch")
    assert main(["add", "beta", run.id]) == 0
    assert clusters.states()["beta"] == ["CANCELLED"] * 3 + ["RUNNING"] * 2


def test_a_job_that_sbatch_did_not_answer_about_is_not_submitted_twice(clusters: Clusters, run: Run) -> None:
    assert main(["release", "beta", run.id]) == 0
    clusters.fault("beta", "sbatch", "timeout")
    assert main(["add", "beta", run.id]) == 0
    assert clusters.states()["beta"] == ["CANCELLED"] * 2 + ["RUNNING"] * 2


@pytest.mark.parametrize(("fault", "first"), [("timeout", 0), ("lost", 4)])
def test_a_job_that_sbatch_did_not_answer_about_keeps_no_other_one_away(
    clusters: Clusters, run: Run, fault: str, first: int
) -> None:
    """Whether it came all the same, and has ended since, or never did."""
    assert main(["release", "beta", run.id]) == 0
    clusters.fault("beta", "sbatch", fault)
    assert main(["add", "beta", run.id]) == first
    clusters.fault("beta", "sbatch")
    assert main(["release", "beta", run.id]) == 0
    for asked in (clusters.directory(run, "beta") / "jobs").glob("*.asked") if first else ():
        os.utime(asked, (0, 0))
    assert main(["add", "beta", run.id]) == 0
    assert sorted(clusters.states()["beta"])[-2:] == ["RUNNING"] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["release", "delta"], "delta is no site of"),
        (["release", "alpha"], "alpha trains or scores"),
        (["add", "alpha"], "alpha trains or scores"),
    ],
)
def test_what_cannot_be_released_or_added_is_refused(
    clusters: Clusters, run: Run, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, run.id]) == 2
    assert said in capsys.readouterr().err
    assert clusters.states() == {"alpha": ["RUNNING"], "beta": ["RUNNING"] * 2, "gamma": ["RUNNING"]}


def test_the_last_rollouts_are_not_released(clusters: Clusters, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    clusters.control(run, "replica_lost", member=MEMBERS[1], cause="killed")
    assert main(["release", "gamma", run.id]) == 2
    assert "gamma: the only rollouts that the run has left are there" in capsys.readouterr().err
    clusters.control(run, "replica_back", member=MEMBERS[1])
    assert main(["release", "gamma", run.id]) == 0


def test_a_run_that_has_ended_and_a_site_that_does_not_answer_are_said(
    clusters: Clusters, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters.cut("beta")
    assert main(["release", "beta", run.id]) == 4
    assert "beta: does not answer" in capsys.readouterr().err
    clusters.cut("beta", dead=False)
    clusters.cut("alpha")
    assert main(["release", "beta", run.id]) == 4
    assert "alpha: " in capsys.readouterr().err
    assert clusters.states()["beta"] == ["RUNNING"] * 2, "the controller was not told"
    clusters.cut("alpha", dead=False)
    clusters.finish(run)
    assert main(["add", "beta", run.id]) == 2
    assert f"{run.id} is finished; `hetrl add` is for a run that goes on" in capsys.readouterr().err
    assert not [event for event in read_lines(run.events) if event["kind"] == "released"]
