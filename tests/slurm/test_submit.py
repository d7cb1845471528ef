"""`hetrl submit` on three real clusters that share nothing but ssh: the launcher is a process on the head of alpha."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.lab.lab import ROOT, Lab
from tests.lab.shape import JOB_USER, JOB_USER_ID
from tests.launch_cases import until
from tests.slurm import members

SITES = ("alpha", "beta", "gamma")
GRES = {"alpha": "a100", "beta": "l40s", "gamma": "l4"}
WORK = "work"
SUBMIT = "from tests.slurm_cases import submit_here; submit_here()"
PATIENCE_SECONDS = 120.0


class Launcher:
    """An experiment in the job user's home at alpha, and `hetrl` on that head."""

    def __init__(self, lab: Lab, name: str, launch: dict[str, object]) -> None:
        self.lab, self.name = lab, name
        self.home = lab.home("alpha") / WORK / name
        (self.home / "templates").mkdir(parents=True)
        (self.home / "templates/gang.sbatch.j2").write_text(members.GANG)
        (self.home / "templates/array.sbatch.j2").write_text(members.ARRAY)
        for site in SITES:
            (self.home / f"{site}.yaml").write_text(yaml.safe_dump(site_file(site, name)))
        settings = {"executor": "slurm", "walltime": "00:20:00", "poll_seconds": 1, "templates": "templates"}
        config = {
            "name": "quick",
            "model": {"architecture": "qwen3-0.6b"},
            "data": {"kind": "larger-digit"},
            "batch": {"samples": 16, "prompt_tokens": 4, "response_tokens": 4},
            "steps": 2,
            "topology": {"sites": [f"{site}.yaml" for site in SITES]},
            "launch": {**settings, **launch},
        }
        (self.home / "config.yaml").write_text(yaml.safe_dump(config))
        for path in (self.home.parent, self.home, *self.home.rglob("*")):
            os.chown(path, JOB_USER_ID, JOB_USER_ID)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `hetrl VERB ...`, or the submission of the quick plan without arguments."""
        program = ["-m", "launch.cli", *arguments] if arguments else ["-c", SUBMIT]
        inside = f'cd {WORK}/{self.name} && exec "$@"'
        command = ["sh", "-c", inside, "sh", sys.executable, *program]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.lab.popen("alpha", command, environment={"PYTHONPATH": str(ROOT)}, **pipes)

    def hetrl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    @property
    def run(self) -> Path:
        """Return the directory of the run."""
        (found,) = (self.home / "runs").iterdir()
        return found

    def state(self) -> dict[str, object]:
        return json.loads((self.run / "state.json").read_text())

    def kinds(self) -> list[str]:
        found = sorted((self.home / "runs").glob("*/events.jsonl"))
        return [json.loads(line)["kind"] for path in found for line in path.read_text().splitlines()]

    def until(self, follower: subprocess.Popen[str], kind: str) -> None:
        """Wait for an event of a run that a launcher follows."""

        def came() -> bool:
            over = follower.poll() is not None
            assert kind in self.kinds() or not over, "".join(follower.communicate())
            return kind in self.kinds()

        until(came, kind, PATIENCE_SECONDS)

    def directory(self, site: str) -> Path:
        """Return the run's directory at a cluster."""
        return self.lab.home(site) / WORK / self.name / "scratch/hetrl" / self.run.name / site

    def tell(self, site: str, file: str) -> None:
        """Let the jobs of a site end, or fail."""
        (self.directory(site) / file).touch()


def site_file(site: str, name: str) -> dict[str, object]:
    return {
        "name": site,
        "ssh": "local" if site == "alpha" else site,
        "scratch": f"/home/{JOB_USER}/{WORK}/{name}/scratch",
        "python": sys.executable,
        "gres": {GRES[site]: "cpu"},
        "nodes": [{"name": f"{site}-0", "gpu": "cpu", "gpus": 4, "host_memory_gb": 8}],
        "allocation": "gpu" if site == "beta" else "node",  # so that its replica is an array
    }


@pytest.fixture
def launcher(strangers: Lab, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    launch = getattr(request, "param", {})
    made = Launcher(strangers, re.sub(r"\W", "_", request.node.name), launch)
    yield made
    for site in SITES:
        strangers.run(site, ["scancel", f"--user={JOB_USER}"])


def jobs(lab: Lab, site: str) -> list[str]:
    """Return what squeue says of the jobs that wait or run, a state each."""
    return lab.run(site, ["squeue", "--local", "--noheader", f"--user={JOB_USER}", "--format=%T"]).stdout.split()


def everywhere(lab: Lab) -> dict[str, list[str]]:
    return {site: jobs(lab, site) for site in SITES}


NOTHING = {site: [] for site in SITES}


@contextmanager
def controller(lab: Lab, site: str, number: signal.Signals, back: signal.Signals | None) -> Iterator[None]:
    """Send slurmctld of a site a signal, and afterwards another one, or start it again."""

    def tell(what: signal.Signals) -> None:
        lab.run(site, ["sh", "-c", f"kill -{int(what)} $(cat /run/slurmctld.pid)"], user="root")

    tell(number)
    try:
        yield
    finally:
        if back is not None:
            tell(back)
        else:
            lab.run(site, ["slurmctld"], user="root")
        nodes = ["sinfo", "--local", "--noheader", "--partition=gpu", "--format=%T"]
        usable = {"idle", "mixed", "allocated"}
        until(
            lambda: (found := set(lab.run(site, nodes, check=False).stdout.split())) and found <= usable,
            f"usable nodes at {site}",
            PATIENCE_SECONDS,
        )


def test_run_is_submitted_followed_and_comes_home(launcher: Launcher) -> None:
    lab = launcher.lab
    follower = launcher.start()
    launcher.until(follower, "go")
    assert everywhere(lab) == {"alpha": ["RUNNING"], "beta": ["RUNNING", "RUNNING"], "gamma": ["RUNNING"]}
    shown = launcher.hetrl("status").stdout
    assert "gamma/gang" in shown
    assert "RUNNING on gamma-1" in shown
    carried = launcher.directory("alpha") / "peers/gamma.endpoint"
    until(carried.exists, "the address of gamma's gateway at alpha")
    assert carried.read_text() == "tcp://gamma-1:7001\n"
    for site in SITES:
        launcher.tell(site, "end")
    stdout, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
    assert follower.returncode == 0, stdout + stderr
    assert launcher.state()["phase"] == "finished"
    assert {job["state"] for job in launcher.state()["jobs"]} <= {"COMPLETED", "CANCELLED"}
    assert (launcher.run / "logs/gamma/gateway.log").read_text() == "up on gamma-1\n"
    assert everywhere(lab) == NOTHING


def test_job_that_fails_ends_the_others(launcher: Launcher) -> None:
    follower = launcher.start()
    launcher.until(follower, "go")
    launcher.tell("gamma", "fail")
    _, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
    assert follower.returncode == 1
    assert "gamma: gang (job" in stderr
    assert "RuntimeError: told to fail" in stderr
    until(lambda: everywhere(launcher.lab) == NOTHING, "an end of all jobs", 30)


def test_launcher_that_is_killed_leaves_a_run_that_another_one_follows(launcher: Launcher) -> None:
    first = launcher.start()
    launcher.until(first, "submitting")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert launcher.hetrl("resume", "--detach").returncode == 0
    assert {site: len(found) for site, found in everywhere(launcher.lab).items()} == {"alpha": 1, "beta": 2, "gamma": 1}
    for site in SITES:
        launcher.tell(site, "end")
    assert launcher.hetrl("resume").returncode == 0
    assert everywhere(launcher.lab) == NOTHING


@pytest.mark.parametrize("back", [signal.SIGCONT, None], ids=["hung", "down"])
def test_cluster_without_its_controller_undoes_the_others(launcher: Launcher, back: signal.Signals | None) -> None:
    lab, number = launcher.lab, signal.SIGTERM if back is None else signal.SIGSTOP
    held, hold = hold_logins(lab, "gamma")
    follower = launcher.start()
    launcher.until(follower, "submitting")  # the preflight is over, the submission is yet to come
    hold.touch()
    until(held.exists, "the submission at gamma", 60)
    with controller(lab, "gamma", number, back):
        hold.unlink()
        _, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
        assert follower.returncode == 4, stderr
        assert "gamma: squeue failed" in stderr
        assert everywhere_but(lab, "gamma") == {"alpha": [], "beta": []}
    assert jobs(lab, "gamma") == []
    assert not any(launcher.directory(site).exists() for site in SITES)


def hold_logins(lab: Lab, site: str) -> tuple[Path, Path]:
    """Let login shells of a site wait while the second file is there; the first appears when one does."""
    held, hold = (lab.home(site) / name for name in ("held", "hold"))
    held.unlink(missing_ok=True)
    wait = "if [ -e hold ]; then touch held; while [ -e hold ]; do sleep 0.1; done; fi\n"
    (lab.home(site) / ".bash_profile").write_text(wait)
    return held, hold


def everywhere_but(lab: Lab, out: str) -> dict[str, list[str]]:
    return {site: jobs(lab, site) for site in SITES if site != out}


def test_cluster_that_is_cut_off_is_unknown_and_the_run_goes_on(launcher: Launcher) -> None:
    lab = launcher.lab
    follower = launcher.start()
    launcher.until(follower, "go")
    with controller(lab, "beta", signal.SIGSTOP, signal.SIGCONT):
        launcher.until(follower, "site_silent")
        assert "beta/gang" in launcher.hetrl("status").stdout
        assert follower.poll() is None
    launcher.until(follower, "site_answers")
    for site in SITES:
        launcher.tell(site, "end")
    assert follower.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("launcher", [{"gang_timeout": "00:00:02"}], indirect=True)
def test_site_that_never_starts_gives_the_nodes_of_the_others_back(launcher: Launcher) -> None:
    lab = launcher.lab
    lab.run("alpha", ["sbatch", "--exclusive", "--nodes=2", "--wrap=sleep 600"])
    follower = launcher.start()
    _, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
    assert follower.returncode == 6, stderr
    assert "alpha: gang still waits" in stderr
    until(lambda: everywhere(lab) == {"alpha": ["RUNNING"], "beta": [], "gamma": []}, "an end of all jobs", 30)


def test_cancel_reaches_what_it_can_and_says_what_remains(launcher: Launcher) -> None:
    lab = launcher.lab
    follower = launcher.start()
    launcher.until(follower, "go")
    os.killpg(follower.pid, signal.SIGKILL)
    follower.wait()
    lab.cut("alpha", "gamma")
    done = launcher.hetrl("cancel")
    assert done.returncode == 5, done.stderr
    assert "gamma: " in done.stderr
    lab.heal("alpha", "gamma")
    assert jobs(lab, "gamma") == ["RUNNING"]
    assert launcher.hetrl("cancel").returncode == 0
    until(lambda: everywhere(lab) == NOTHING, "an end of all jobs", 30)
