"""Following a run over three clusters, coming back to it, and ending it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hetrl.errors import GangTimeoutError
from hetrl.files import EventLog, read_lines, replace_json
from hetrl.runtime.checkpoints.places import EarlierRun
from launch import follow
from launch.cli import main
from launch.collect import Collector
from launch.run_directory import Run
from launch.slurm import executor as slurm_executor, jobs as slurm_jobs, poll
from launch.slurm.executor import SlurmExecutor
from launch.slurm.run import read_slurm_run
from launch.slurm.watch import carry, fetch_logs, look_at, refresh
from launch.state import fold
from launch.verbs.checkpoints import history_of
from tests.launch.launch_cases import ROOT, until
from tests.launch.slurm.slurm_cases import SITES, kinds


@pytest.fixture
def clusters(submitted, monkeypatch):
    monkeypatch.setattr(follow, "WORD_SECONDS", 0.2)
    monkeypatch.setattr(follow, "LEAVE_SECONDS", 0.2)
    return submitted


@pytest.fixture
def run(clusters) -> Run:
    return clusters.runs()[0]


def phase(run: Run) -> str:
    return json.loads(run.state.read_text())["phase"]


def test_run_that_finishes_comes_home(clusters, run, capsys):
    clusters.finish(run)
    assert main(["resume"]) == 0
    assert phase(run) == "finished"
    assert [row["step"] for row in read_lines(run.metrics)] == [1, 2]
    assert run.log("alpha", "controller").read_text() == "all is well\n"
    assert "step 2/2  reward 0.50" in capsys.readouterr().out


def test_jobs_that_outlive_the_run_are_cancelled(clusters, run):
    clusters.finish(run)
    clusters.turn("gamma", "RUNNING")
    assert main(["resume"]) == 0
    assert clusters.states()["gamma"] == ["CANCELLED"]


def test_gang_that_the_launcher_ends_after_the_run_has_finished_counts_as_completed(clusters, run, capsys):
    clusters.finish(run)
    for site in ("beta", "gamma"):  # their gateways wait to be ended
        clusters.turn(site, "RUNNING")
    assert main(["resume"]) == 0
    assert clusters.states() == {"alpha": ["COMPLETED"], "beta": ["CANCELLED"] * 2, "gamma": ["CANCELLED"]}
    assert {job["state"] for job in json.loads(run.state.read_text())["jobs"]} == {"COMPLETED"}
    assert "CANCELLED" not in (run.path / "report.html").read_text()
    capsys.readouterr()
    assert main(["status"]) == 0
    assert "gamma/gang  1  COMPLETED on a-n1" in capsys.readouterr().out


def test_job_that_was_cancelled_while_the_run_went_on_is_not_called_completed(clusters, run):
    clusters.turn("gamma", "CANCELLED")
    assert main(["resume"]) == 1
    assert "CANCELLED" in {job["state"] for job in json.loads(run.state.read_text())["jobs"]}


def test_job_that_fails_ends_its_siblings_everywhere_and_says_why(clusters, run, capsys):
    there = clusters.directory(run, "gamma") / "logs"
    (there / "actor_generation-1.log").write_text("loading\nRuntimeError: no such device\n")
    (there / "gang-1.log").write_text("srun: error: gamma-1: task 0: Exited with exit code 1\n")
    clusters.turn("gamma", "FAILED", reason="NonZeroExitCode")
    assert main(["resume"]) == 1
    shown = capsys.readouterr().err
    assert "gamma: gang (job 1 ended: FAILED (NonZeroExitCode)): RuntimeError: no such device; see" in shown
    assert clusters.states() == {"alpha": ["CANCELLED"], "beta": ["CANCELLED"] * 2, "gamma": ["FAILED"]}


def test_nothing_is_said_to_be_over_while_slurm_still_tidies_up(clusters, run, monkeypatch, capsys):
    monkeypatch.setattr(slurm_executor, "ENDING_POLL_SECONDS", 0.1)
    clusters.fault("gamma", "scancel", "slow")
    clusters.turn("beta", "FAILED")
    assert main(["resume"]) == 1
    assert "nothing of it goes on" in capsys.readouterr().err
    states = {(job["site"], job["state"]) for job in json.loads(run.state.read_text())["jobs"]}
    assert states == {("alpha", "CANCELLED"), ("beta", "FAILED"), ("gamma", "CANCELLED")}


def test_the_process_that_failed_first_is_the_cause(clusters, run, capsys):
    there = clusters.directory(run, "gamma") / "logs"
    (there / "actor_generation-1.log").write_text("RuntimeError: connection lost\n")
    (there / "actor_training-1.log").write_text("loading\nINFO: step 3 begins\n")
    (there / "gang-1.log").write_text("... the job ends with exit code 137, for actor_training-1 failed first\n")
    clusters.turn("gamma", "FAILED", reason="NonZeroExitCode")
    assert main(["resume"]) == 1
    said = "gamma: gang (job 1 ended: FAILED (NonZeroExitCode)): actor_training-1 was ended by SIGKILL; see"
    assert said in capsys.readouterr().err


def test_lead_job_that_is_gone_without_a_word_ends_the_run(clusters, run, capsys):
    clusters.turn("alpha", "FORGOTTEN")
    assert main(["resume"]) == 1
    assert "alpha: gang (job 1 ended: GONE)" in capsys.readouterr().err
    assert clusters.states()["beta"] == ["CANCELLED"] * 2


def test_controller_that_gave_up_passes_its_code_on_and_the_nodes_are_given_back(clusters, run, capsys):
    clusters.turn("gamma", "PENDING")
    clusters.control(run, "failed", cause="gamma/actor_generation/1: not ready within 600 s", exit_code=6)
    clusters.turn("alpha", "FAILED")
    assert main(["resume"]) == 6
    assert "gamma/actor_generation/1: not ready" in capsys.readouterr().err
    assert clusters.states() == {"alpha": ["FAILED"], "beta": ["CANCELLED"] * 2, "gamma": ["CANCELLED"]}


def test_lead_that_never_starts_is_given_up_by_the_launcher(clusters, run, monkeypatch, capsys):
    monkeypatch.setattr(slurm_jobs, "START_MARGIN_SECONDS", -3600.0)  # beta and gamma count as started long ago
    clusters.turn("alpha", "PENDING")
    assert main(["resume"]) == 6
    assert "alpha: gang still waits" in capsys.readouterr().err
    assert clusters.states() == {"alpha": ["CANCELLED"], "beta": ["CANCELLED"] * 2, "gamma": ["CANCELLED"]}


def looked_at(run: Run) -> slurm_jobs.Jobs:
    """Return the jobs of a run after a look at every site."""
    slurm = read_slurm_run(run)
    jobs = slurm_jobs.jobs_of(slurm, EventLog(run.events, "test"), refresh(run, slurm, "test"))
    for site in SITES:
        look_again(jobs, run, site)
    return jobs


def look_again(jobs: slurm_jobs.Jobs, run: Run, name: str) -> None:
    site = jobs.slurm.site(name)
    jobs.note(site, look_at(run, site))


def test_nobody_is_given_up_while_all_wait(clusters, run, monkeypatch):
    monkeypatch.setattr(slurm_jobs, "START_MARGIN_SECONDS", -1e12)
    for site in SITES:
        clusters.turn(site, "PENDING")
    jobs = looked_at(run)
    jobs.check_start(0.0)
    clusters.turn("beta", "RUNNING")
    look_again(jobs, run, "beta")
    with pytest.raises(GangTimeoutError, match="alpha: gang still waits"):
        jobs.check_start(0.0)


def test_a_job_that_a_run_can_begin_without_may_wait_for_longer(clusters, run, monkeypatch):
    monkeypatch.setattr(slurm_jobs, "START_MARGIN_SECONDS", -1e12)
    described = json.loads(run.slurm.read_text())
    assert [[job["spare"] for job in site["jobs"]] for site in described["sites"]] == [[False], [True, True], [True]]
    run.slurm.write_text(json.dumps({**described, "begins_without_spare": True}))
    clusters.turn("gamma", "PENDING")
    jobs = looked_at(run)
    jobs.check_start(0.0)
    clusters.turn("alpha", "PENDING")
    look_again(jobs, run, "alpha")
    with pytest.raises(GangTimeoutError, match="^alpha: gang still waits"):
        jobs.check_start(0.0)


def test_a_run_that_has_begun_goes_on_without_jobs_that_have_but_rollouts(clusters, run, capsys):
    clusters.control(run, "go", members=["alpha/actor_training/0"])
    clusters.turn("beta", "CANCELLED")
    clusters.turn("gamma", "FAILED")
    phases: list[str] = []

    def finish() -> None:
        def states() -> set[str]:
            return {job["state"] for job in json.loads(run.state.read_text())["jobs"]}

        until(lambda: states() >= {"FAILED", "CANCELLED"}, "the jobs that ended")
        time.sleep(10 * follow.WORD_SECONDS)
        phases.append(phase(run))
        clusters.finish(run)

    finishing = threading.Thread(target=finish)
    finishing.start()
    assert main(["resume"]) == 0
    finishing.join()
    assert phases == ["running"]


@pytest.mark.parametrize("silence", ["ssh", "slurm"])
def test_site_that_does_not_answer_is_unknown_and_the_run_goes_on(clusters, run, silence, capsys):
    def silent(on: bool) -> None:
        if silence == "ssh":
            clusters.cut("beta", on)
        else:
            clusters.fault("beta", "squeue", "down" if on else "")

    silent(True)
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert "beta/gang  1  UNKNOWN, was PENDING" in shown
    assert "alpha/gang  1  RUNNING" in shown
    follower = threading.Timer(2.5, lambda: (silent(False), clusters.finish(run)))
    follower.start()
    assert main(["resume"]) == 0
    follower.join()
    assert {"site_silent", "site_answers", "finished"} <= set(kinds(run))


def test_nothing_is_concluded_from_an_answer_that_was_cut_off(clusters, run):
    slurm = read_slurm_run(run)
    executor = SlurmExecutor(run, slurm, EventLog(run.events, "test"), lambda: fold(read_lines(run.events)))
    clusters.cut("alpha")
    until(lambda: executor.poll() or "site_silent" in kinds(run), "a look at alpha")
    assert ("alpha", "gang", "controller") in [(job.site, job.name, job.role) for job in executor.alive()]
    executor.leave()


def test_cancel_says_what_it_could_not_reach_and_comes_back_for_it(clusters, run, capsys):
    clusters.cut("gamma")
    assert main(["cancel"]) == 5
    assert "gamma: ssh gamma failed" in capsys.readouterr().err
    assert phase(run) == "cancelled"
    assert clusters.states() == {"alpha": ["CANCELLED"], "beta": ["CANCELLED"] * 2, "gamma": ["RUNNING"]}
    clusters.cut("gamma", False)
    assert main(["status"]) == 0
    assert f"jobs of it live on; `hetrl cancel {run.id}` ends them" in capsys.readouterr().err
    assert clusters.states()["gamma"] == ["RUNNING"]
    assert main(["cancel"]) == 0
    assert clusters.states()["gamma"] == ["CANCELLED"]


def test_a_run_that_goes_on_finds_the_directories_of_those_before_it(clusters, run):
    slurm = read_slurm_run(run)
    assert slurm is not None
    here = {site: EarlierRun(Path(clusters.directory(run, site))) for site in SITES}
    assert history_of(run, slurm, [*SITES, "delta"]) == {site: [one] for site, one in here.items()}
    site = run.site("beta") / "site.json"
    replace_json(site, {**json.loads(site.read_text()), "continues": [{"directory": "/scratch/first", "left_at": 7}]})
    assert history_of(run, slurm, ["beta"]) == {"beta": [here["beta"], EarlierRun(Path("/scratch/first"), 7)]}


def test_a_run_that_finished_goes_on_only_with_another_experiment(clusters, run, capsys):
    clusters.finish(run)
    assert main(["resume"]) == 0
    assert main(["resume"]) == 0
    assert "is finished already; nothing of it was left; --config EXPERIMENT" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--replan"], ["--plan", "absent.json"], ["--config", "absent.yaml"]])
def test_what_a_run_shall_have_of_its_own_is_refused_until_it_has_ended(clusters, run, capsys, words):
    assert main(["resume", "--detach", *words]) == 2
    assert f"{run.id}: it has not ended; `hetrl cancel {run.id}` first" in capsys.readouterr().err
    assert clusters.states()["alpha"] == ["RUNNING"]


def test_what_ended_while_nobody_followed_may_have_an_experiment_of_its_own(clusters, run, capsys):
    clusters.control(run, "failed", cause="told to", exit_code=1)
    assert main(["resume", "--config", "absent.yaml"]) == 2
    assert "absent.yaml: No such file or directory" in capsys.readouterr().err


def test_checkpoints_are_partly_known_where_one_site_is_silent_and_not_at_all_where_all_are(clusters, run, capsys):
    clusters.cut("gamma")
    assert main(["checkpoints"]) == 5
    assert main(["export", run.id, "model"]) == 1
    assert "no whole checkpoint is at any site that answers" in capsys.readouterr().err
    clusters.cut("alpha")
    clusters.cut("beta")
    for words in (["checkpoints"], ["export", run.id, "model"]):
        assert main(words) == 4
        said = capsys.readouterr().err
        assert [said.count(f"ssh {site} failed") for site in SITES] == [1, 1, 1]


def test_cancel_when_nobody_answers(clusters, run):
    for site in SITES:
        clusters.cut(site)
    assert main(["cancel"]) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_detaches_and_the_run_goes_on(clusters, run, number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "launch.cli", "resume"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as follower:
        until(lambda: "job_state" in kinds(run), "the first look")
        follower.send_signal(number)
        assert f"hetrl resume {run.id}" in follower.communicate()[1]
        assert follower.returncode == 128 + number
    assert clusters.states()["alpha"] == ["RUNNING"]
    assert phase(run) == "starting"


def test_only_one_launcher_follows(clusters, run, capsys):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-m", "launch.cli", "resume"], env=environment) as follower:
        until(lambda: "job_state" in kinds(run), "the first look")
        assert main(["resume"]) == 2
        assert "another hetrl follows it" in capsys.readouterr().err
        follower.terminate()


def test_logs_of_all_sites_come_merged_and_whole(clusters, run, capsys):
    long = "x" * 300_000
    (clusters.directory(run, "alpha") / "logs/controller.log").write_text(f"{long}\nlast\n")
    (clusters.directory(run, "beta") / "logs/gateway.log").write_bytes("grüße\n".encode())
    assert main(["logs", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["alpha/controller | last", "beta/gateway     | grüße"]
    assert run.log("alpha", "controller").read_text() == f"{long}\nlast\n"


def test_log_that_was_begun_again_replaces_the_copy(clusters, run):
    log = clusters.directory(run, "alpha") / "logs/gateway.log"
    for text in ("first attempt\n", "second\n"):
        log.write_text(text)
        main(["logs"])
        assert run.log("alpha", "gateway").read_text() == text


def test_address_of_a_gateway_is_carried_to_those_that_dial_it(clusters, run):
    slurm, carried = read_slurm_run(run), {}
    (clusters.directory(run, "beta") / "gateway.endpoint").write_text("tcp://10.0.0.7:7001\n")
    beta = slurm.site("beta")
    look_at(run, beta)
    clusters.cut("gamma")
    carry(run, slurm, beta, carried)
    peers = {site: clusters.directory(run, site) / "peers/beta.endpoint" for site in ("alpha", "gamma")}
    assert peers["alpha"].read_text() == "tcp://10.0.0.7:7001\n"
    clusters.cut("gamma", False)
    carry(run, slurm, beta, carried)
    assert peers["gamma"].read_text() == "tcp://10.0.0.7:7001\n"


def test_what_jobs_told_is_read_to_its_end_before_their_end_is_seen(clusters, run, monkeypatch):
    monkeypatch.setattr(poll, "CHUNK_BYTES", 100)
    clusters.finish(run)
    assert refresh(run, read_slurm_run(run), "test").phase == "finished"


def test_logs_come_a_few_at_a_time(clusters, run, monkeypatch):
    monkeypatch.setattr(poll, "LOOK_BYTES", 10)
    slurm, logs = read_slurm_run(run), clusters.directory(run, "beta") / "logs"
    for number in range(3):
        (logs / f"{number}.log").write_text("much to say\n")
    assert len(look_at(run, slurm.site("beta")).chunks) == 1
    fetch_logs(run, slurm)
    assert all((run.path / "logs" / "beta" / f"{number}.log").read_text() for number in range(3))


@pytest.fixture
def watching(run):
    """An executor that looks at the sites of a run, and what it has told."""
    collector = Collector(run, "alpha")
    collector.collect()
    executor = SlurmExecutor(run, read_slurm_run(run), EventLog(run.events, "launcher"), lambda: collector.state)

    def silent() -> dict[str, str]:
        executor.poll()
        collector.collect()
        return dict(collector.state.silent)

    yield silent
    executor.leave()


def test_a_silence_that_another_process_met_is_over_where_the_site_answers(run, watching):
    assert not watching()
    EventLog(run.events, "status").append("site_silent", site="alpha", cause="no agent")
    assert watching()
    until(lambda: not watching(), "alpha answers")


def test_a_look_that_fails_here_is_said_and_tried_again(watching, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("launch.slurm.executor.carry", full)
        until(lambda: "No space left" in watching().get("beta", ""), "it is said")
    until(lambda: not watching(), "it goes on")
