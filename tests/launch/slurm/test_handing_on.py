"""The jobs of a run that failed, as those of the run that takes it up: on clusters that are fakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from lab.processes import wait_until
from launch import follow
from launch.cli import main
from launch.slurm.commands import submit_script
from launch.slurm.run import HELD, read_slurm_run
from launch.verbs import resume
from tests.launch.launch_cases import ROOT
from tests.launch.slurm import fake_slurm
from tests.launch.slurm.slurm_cases import SITES, Clusters, environment, make_clusters, submit
from tests.runs import job_ids

SUBMISSIONS = {"alpha": 1, "beta": 2, "gamma": 1}
DEADLINE_SECONDS = 120.0


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clusters]:
    monkeypatch.setattr(follow, "WORD_SECONDS", 0.1)
    made = make_clusters(tmp_path)
    document = yaml.safe_load(made.config.read_text())
    launch = {**document["launch"], "restarts": 1}
    model = {"architecture": "tiny-qwen3"}  # one that a run can draw weights for
    topology = {**document["topology"], "links": str(ROOT / "topology/quickstart-links.yaml")}
    made.config.write_text(yaml.safe_dump({**document, "model": model, "topology": topology, "launch": launch}))
    with environment(made):
        yield made


def submissions(clusters: Clusters) -> dict[str, int]:
    return {site: clusters.submissions(site) for site in SITES}


def hold(clusters: Clusters, site: str) -> None:
    """Let the jobs of a site hold their nodes."""
    with fake_slurm.Queue(clusters.path / site) as jobs:
        for job in jobs:
            job["name"] = f"{HELD}{job['name']}"


def followed(clusters: Clusters, *, steps: int = 1, exit_code: int = 1, again: bool = True) -> int:
    """Follow a run that fails after some steps; the one that takes it up `again` finishes. Returns the exit code."""

    def play() -> None:
        (failed,) = clusters.runs()
        clusters.control(failed, "go", members=["alpha/actor_training/0"])
        for step in range(1, steps + 1):
            clusters.control(failed, "step", step=step, of=2, reward=0.5, seconds={"iteration": 1.0})
        hold(clusters, "alpha")
        clusters.control(failed, "failed", cause="a rank is gone", exit_code=exit_code)
        if not again:
            return
        wait_until(taken_up, DEADLINE_SECONDS, lambda: "the run is not taken up")
        clusters.finish(clusters.runs()[1])

    def taken_up() -> bool:
        return [len(job_ids(run.path)) for run in clusters.runs()] == [4, 4]

    playing = threading.Thread(target=play, daemon=True)
    playing.start()
    return main(["resume"])


def test_the_jobs_of_a_run_that_failed_go_on_as_those_of_the_next(clusters: Clusters) -> None:
    """Those that hold their nodes, and those that have not noticed yet; nothing is submitted, nothing cancelled."""
    assert submit(clusters) == 0
    assert followed(clusters) == 0
    failed, run = clusters.runs()
    assert job_ids(run.path) == job_ids(failed.path)
    assert submissions(clusters) == SUBMISSIONS
    assert {state for states in clusters.states().values() for state in states} == {"COMPLETED"}
    slurm = read_slurm_run(run)
    assert slurm is not None
    for site in slurm.sites:
        assert [job["name"] for job in clusters.jobs(site.name)] == [job.key for job in site.jobs]
        for job in site.jobs:
            assert (clusters.directory(failed, site.name) / "handed" / job.name).read_text() == f"{site.directory}\n"


def test_a_squeue_that_does_not_answer_is_not_one_that_knows_no_job(clusters: Clusters) -> None:
    """Where jobs that go on are looked up: first to end their members, then to take them over."""
    assert submit(clusters) == 0
    clusters.fault("alpha", "squeue", "rows-down rows-down rows-down")
    assert followed(clusters) == 0
    assert not fake_slurm.fault(clusters.path / "alpha", "squeue")
    assert submissions(clusters) == SUBMISSIONS


def test_a_launcher_that_ends_between_the_name_and_the_word_tells_it_later(clusters: Clusters) -> None:
    assert submit(clusters) == 0
    assert followed(clusters) == 0
    failed, run = clusters.runs()
    slurm = read_slurm_run(run)
    assert slurm is not None
    handed = clusters.directory(failed, "alpha") / "handed/gang"
    handed.unlink()
    (clusters.directory(run, "alpha") / "jobs/gang").unlink()
    slurm.lead.shell.run(["bash", "-lc", submit_script(slurm.lead)], timeout_seconds=DEADLINE_SECONDS)
    assert handed.read_text() == f"{slurm.lead.directory}\n"
    assert submissions(clusters) == SUBMISSIONS


@pytest.mark.parametrize(("steps", "exit_code"), [(0, 1), (1, 2)])
def test_nodes_are_given_back_where_another_start_would_end_likewise(
    clusters: Clusters, steps: int, exit_code: int
) -> None:
    assert submit(clusters) == 0
    assert followed(clusters, steps=steps, exit_code=exit_code, again=False) == exit_code
    assert len(clusters.runs()) == 1
    assert {state for states in clusters.states().values() for state in states} == {"CANCELLED"}


@pytest.mark.parametrize("word", ["cancel", "resume"])
def test_a_run_that_waits_to_be_taken_up_is_its_launcher_s(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    """Whoever cancels the one that failed has nothing submitted; nobody else takes it up."""
    waits, said = threading.Event(), resume.say

    def say(console: Console, text: str) -> None:
        said(console, text)
        if "trying again" in text:
            waits.set()

    monkeypatch.setattr(resume, "say", say)
    monkeypatch.setattr(resume, "AGAIN_SECONDS", 0.2)

    def play() -> None:
        (failed,) = clusters.runs()
        clusters.control(failed, "go", members=["alpha/actor_training/0"])
        clusters.control(failed, "step", step=1, of=2, reward=0.5, seconds={"iteration": 1.0})
        clusters.fault("beta", "scontrol", "down")
        clusters.control(failed, "failed", cause="a rank is gone", exit_code=1)
        assert waits.wait(DEADLINE_SECONDS)
        codes.append(main([word, failed.id]))
        clusters.fault("beta", "scontrol")
        if word == "resume":
            wait_until(lambda: len(job_ids(clusters.runs()[1].path)) == 4, DEADLINE_SECONDS, lambda: "it is not")
            clusters.finish(clusters.runs()[1])

    assert submit(clusters) == 0
    codes = list[int]()
    other = threading.Thread(target=play, daemon=True)
    other.start()
    code = main(["resume"])
    other.join(DEADLINE_SECONDS)
    assert (code, codes) == ((1, [0]) if word == "cancel" else (0, [2]))
    assert len(clusters.runs()) == 2
    states = {state for states in clusters.states().values() for state in states}
    if word == "cancel":
        assert (submissions(clusters), states) == (SUBMISSIONS, {"CANCELLED"})
        assert "was cancelled: " in capsys.readouterr().err
    else:
        assert "another hetrl follows it" in capsys.readouterr().err


def test_where_the_time_is_up_all_jobs_are_submitted_anew(clusters: Clusters) -> None:
    assert submit(clusters) == 0
    assert followed(clusters, exit_code=7) == 0
    failed, run = clusters.runs()
    assert submissions(clusters) == {site: 2 * count for site, count in SUBMISSIONS.items()}
    assert job_ids(run.path).keys() == job_ids(failed.path).keys()
    assert not set(job_ids(run.path).items()) & set(job_ids(failed.path).items())


def test_a_job_that_asks_for_something_else_is_submitted_and_the_other_one_ended(clusters: Clusters) -> None:
    assert submit(clusters) == 0
    (failed,) = clusters.runs()
    script = failed.site("beta") / "scripts/array-cpu.sbatch"
    script.write_text(script.read_text().replace("#SBATCH --array=0-0", "#SBATCH --array=0-1"))
    assert followed(clusters) == 0
    failed, run = clusters.runs()
    differing = {job for job, number in job_ids(run.path).items() if job_ids(failed.path)[job] != number}
    assert differing == {("beta", "array-cpu")}
    assert clusters.states()["beta"] == ["COMPLETED"] * 3  # the fake lets all jobs end so
    assert any(
        f"scancel {job_ids(failed.path)['beta', 'array-cpu']}" == call for call in clusters.calls("beta", "scancel")
    )
