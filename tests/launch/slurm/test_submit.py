"""Submitting to three clusters: all or nowhere, nothing twice, and what is said where it fails."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import time

import pytest
import yaml

from hetrl.errors import HetrlError, PartialError, SiteUnreachableError
from hetrl.files import read_lines
from hetrl.runtime.transport.rendezvous import peer_endpoint
from launch.cli import main
from launch.run_directory import Run
from launch.slurm import commands as slurm_commands, submit as slurm_submit
from launch.slurm.commands import MANIFEST
from launch.slurm.files import pack, send
from launch.slurm.poll import GROWING, REPLACED
from launch.slurm.run import read_slurm_run
from launch.slurm.submit import submit_everywhere
from launch.slurm.watch import refresh
from tests.launch.launch_cases import ROOT
from tests.launch.slurm.slurm_cases import SITES, Clusters, environment, kinds, make_clusters, submit

ALL_RUN = {"alpha": ["RUNNING"], "beta": ["RUNNING", "RUNNING"], "gamma": ["RUNNING"]}
JOBS = 4


@pytest.fixture
def clusters(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_commands, "ASK_SECONDS", 3)
    monkeypatch.setattr(slurm_commands, "SBATCH_SECONDS", 3)
    monkeypatch.setattr(slurm_submit, "AGAIN_SECONDS", 0.1)
    made = make_clusters(tmp_path)
    with environment(made):
        yield made


def alive(clusters: Clusters) -> int:
    return sum(state in ("RUNNING", "PENDING") for states in clusters.states().values() for state in states)


def test_every_job_is_submitted_once_from_the_directory_that_was_sent(clusters):
    assert submit(clusters) == 0
    (run,) = clusters.runs()
    assert clusters.states() == ALL_RUN
    assert kinds(run) == ["planned", *["submitting"] * JOBS, *["submitted"] * JOBS]
    there = clusters.directory(run, "beta")
    assert stat.S_IMODE(there.stat().st_mode) == 0o700
    assert stat.S_IMODE((there / "keys.json").stat().st_mode) == 0o600
    assert (there / "code/hetrl/runtime/run/step.py").is_file()
    assert (there / "logs").is_dir()
    state = json.loads(run.state.read_text())
    assert [(job["site"], job["name"], job["id"], job["submit_time"]) for job in state["jobs"]] == [
        ("alpha", "gang", "1", "2026-11-21T12:00:01"),
        ("beta", "gang", "1", "2026-11-21T12:00:01"),
        ("beta", "array-cpu", "2", "2026-11-21T12:00:02"),
        ("gamma", "gang", "1", "2026-11-21T12:00:01"),
    ]


def test_a_submission_takes_three_round_trips_per_site(clusters):
    submit(clusters)
    slurm = read_slurm_run(clusters.runs()[0])
    assert [site.host for site in slurm.sites] == list(SITES)
    for site in SITES:
        commands = (clusters.path / site / "trips").read_text().splitlines()
        assert [command.split()[0] for command in commands] == ["sh", "mkdir", "sh"]  # mkdir && rsync


def test_one_login_node_serves_all_clusters(clusters):
    for site in SITES:
        path = clusters.path / f"{site}.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "ssh": "alpha", "cluster": site}))
    assert submit(clusters) == 0
    assert clusters.states() == ALL_RUN
    assert not any((clusters.path / site / "trips").exists() for site in ("beta", "gamma"))
    (run,) = clusters.runs()
    assert [row["job_id"] for row in read_lines(run.events) if row["kind"] == "submitted"] == ["1", "1", "2", "1"]
    clusters.turn("gamma", "FAILED")
    states = {(job["site"], job["state"]) for job in refresh(run, read_slurm_run(run), "test").jobs}
    assert states == {("alpha", "RUNNING"), ("beta", "RUNNING"), ("gamma", "FAILED")}
    assert main(["cancel"]) == 0
    assert alive(clusters) == 0


def test_submitting_again_finds_the_jobs_and_asks_for_none(clusters):
    submit(clusters)
    (run,) = clusters.runs()
    before = {site: clusters.submissions(site) for site in SITES}
    assert main(["resume", "--detach"]) == 0
    for site in SITES:
        (clusters.directory(run, site) / "jobs" / "gang").unlink()  # not even the site's own note is there
    slurm = read_slurm_run(run)
    submit_everywhere(run, slurm, _Silent(), _nothing_known(), lambda: None)
    assert {site: clusters.submissions(site) for site in SITES} == before


class _Silent:
    def append(self, kind: str, **fields: object) -> None: ...


def _nothing_known():
    from launch.state import State

    return State()


def test_sbatch_that_timed_out_and_queued_is_adopted(clusters):
    clusters.fault("beta", "sbatch", "timeout")
    assert submit(clusters) == 0
    assert clusters.states() == ALL_RUN
    assert clusters.submissions("beta") == 2
    (run,) = clusters.runs()
    assert [row["job_id"] for row in read_lines(run.events) if row["kind"] == "submitted"] == ["1", "1", "2", "1"]


def test_sbatch_that_timed_out_and_is_not_found_is_undone_and_never_asked_for_again(clusters, capsys):
    clusters.fault("beta", "sbatch", "lost")
    assert submit(clusters) == 4
    assert "beta: gang was not accepted: " in capsys.readouterr().err
    assert clusters.submissions("beta") == 1
    assert alive(clusters) == 0


def test_job_that_a_hung_controller_takes_up_after_the_undo_finds_no_directory(clusters):
    clusters.fault("beta", "sbatch", "lost")
    submit(clusters)
    (run,) = clusters.runs()
    assert not any(clusters.directory(run, site).exists() for site in SITES)


def test_site_that_refuses_undoes_the_others_and_is_quoted(clusters, capsys):
    clusters.fault("beta", "sbatch", "refuse-array")
    assert submit(clusters) == 1
    shown = capsys.readouterr().err
    assert "beta: array-cpu was not accepted: Batch job submission failed: Invalid account" in shown
    assert "3 jobs that had been accepted: cancelled" in shown
    assert clusters.states() == {"alpha": ["CANCELLED"], "beta": ["CANCELLED"], "gamma": ["CANCELLED"]}
    (run,) = clusters.runs()
    assert json.loads(run.state.read_text())["phase"] == "failed"
    assert alive(clusters) == 0


@pytest.mark.parametrize("kind", ["down", "hang"])
def test_controller_that_is_gone_or_hangs_undoes_the_others(clusters, kind, capsys):
    clusters.fault("gamma", "squeue", kind)
    assert submit(clusters) == 4
    shown = capsys.readouterr().err
    assert "gamma: squeue failed" in shown
    assert "not undone" in shown
    assert alive(clusters) == 0
    assert clusters.submissions("gamma") == 0


def test_site_that_vanishes_after_the_preflight_undoes_the_others(clusters, capsys):
    clusters.fault("gamma", "scontrol", "cut-after")
    assert submit(clusters) == 4
    assert "gamma: " in capsys.readouterr().err
    assert clusters.states() == {"alpha": ["CANCELLED"], "beta": ["CANCELLED", "CANCELLED"], "gamma": []}


def test_preflight_asks_before_anything_is_sent(clusters):
    clusters.fault("beta", "sbatch", "unfit")
    with pytest.raises(HetrlError, match="beta: job gang: allocation failure: Requested node configuration"):
        submit(clusters)
    clusters.cut("gamma")
    with pytest.raises(SiteUnreachableError, match="gamma: ssh gamma failed"):
        submit(clusters)
    for run in clusters.runs():
        assert kinds(run) == ["planned", "failed"]
        assert not any(clusters.directory(run, site).exists() for site in SITES)
    assert alive(clusters) == 0


def test_a_site_whose_copy_is_damaged_submits_nothing(clusters):
    clusters.fault("beta", "rsync", "damage")
    assert submit(clusters) == 1
    assert clusters.submissions("beta") == 0
    assert alive(clusters) == 0


def launched_alone(clusters: Clusters) -> int:
    """Submit from a process of its own; returns its exit code."""
    code = f"from tests.launch.slurm.slurm_cases import drive; drive({str(clusters.path)!r})"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode


def test_what_the_jobs_wrote_outlives_another_copy(clusters):
    submit(clusters)
    (run,) = clusters.runs()
    slurm = read_slurm_run(run)
    files = ["logs/gateway.log", "logs/gang.hosts", "ended/array-cpu.0", "checkpoints/step-1/state.json"]
    files += [*GROWING, *REPLACED, peer_endpoint("beta"), "jobs/gang"]
    here, there = run.site("alpha"), clusters.directory(run, "alpha")
    for directory, said in ((here, "here"), (there, "there")):
        for name in files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(said)
    (here / "config.yaml").write_text("another\n")
    pack(run.site("alpha"))
    send(run.site("alpha"), slurm.site("alpha"))
    assert (there / "config.yaml").read_text() == "another\n"
    assert [name for name in files if (there / name).read_text() != "there"] == []
    listed = {line.split("  ")[1] for line in (there / MANIFEST).read_text().splitlines()}
    assert "config.yaml" in listed and not listed.intersection(files)


def test_interrupt_while_submitting_undoes_it(clusters):
    clusters.fault("beta", "sbatch", "interrupt-after")
    assert launched_alone(clusters) == 128 + signal.SIGINT
    (run,) = clusters.runs()
    assert json.loads(run.state.read_text())["phase"] == "cancelled"
    assert alive(clusters) == 0


STEPS = [
    ("alpha", "scontrol", "kill-before"),
    ("beta", "rsync", "kill-before"),
    ("beta", "rsync", "kill-after"),
    ("alpha", "squeue", "kill-before"),
    ("beta", "sbatch", "kill-before"),
    ("beta", "sbatch", "kill-after"),
    ("gamma", "sbatch", "kill-after"),
]


@pytest.mark.parametrize(("site", "program", "fault"), STEPS)
def test_launcher_that_is_killed_is_taken_over_without_orphans_or_twins(clusters, site, program, fault):
    clusters.fault(site, program, fault)
    assert launched_alone(clusters) == -9
    clusters.fault(site, program)
    (run,) = clusters.runs()
    assert main(["resume", "--detach"]) == 0
    assert clusters.states() == ALL_RUN
    assert {job["state"] for job in refresh(run, read_slurm_run(run), "test").jobs} == {"RUNNING"}
    assert Run(run.path).slurm.is_file()
    clusters.finish(run)
    assert main(["resume"]) == 0
    assert alive(clusters) == 0


def test_what_an_earlier_launcher_brought_to_its_sites_is_not_undone(clusters, capsys):
    """It may train by now, and have checkpoints."""
    clusters.fault("beta", "sbatch", "kill-after")
    assert launched_alone(clusters) == -9
    clusters.fault("beta", "sbatch")
    (run,) = clusters.runs()
    clusters.cut("gamma")
    assert main(["resume", "--detach"]) == SiteUnreachableError.exit_code
    said = capsys.readouterr().err
    assert "nothing is withdrawn; resume it again, or cancel it" in said
    assert "goes on without this process" in said
    assert clusters.states()["alpha"] == ["RUNNING"]
    assert clusters.directory(run, "alpha").is_dir()
    clusters.cut("gamma", dead=False)
    assert main(["resume", "--detach"]) == 0
    assert clusters.states() == ALL_RUN


@pytest.mark.parametrize(("seconds", "code"), [("2", 0), ("60", PartialError.exit_code)])
def test_cancel_waits_for_a_submission_that_is_at_work(clusters, monkeypatch, capsys, seconds, code):
    monkeypatch.setattr(slurm_commands, "LOCK_SECONDS", 5)
    assert submit(clusters) == 0
    (run,) = clusters.runs()
    with subprocess.Popen(["flock", clusters.directory(run, "beta") / ".submitting", "sleep", seconds]) as submission:
        time.sleep(0.3)
        assert main(["cancel"]) == code
        assert (submission.poll() is None) == bool(code)
        submission.kill()
    assert ("beta: a submission is still at work there" in capsys.readouterr().err) == bool(code)
    assert alive(clusters) == 0
