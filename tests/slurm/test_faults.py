"""Clusters that fail `hetrl submit`: without a controller, out of reach, or of another opinion."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from lab.lab import Lab
from lab.launcher import ALL_RUN, NOTHING, Held, Launcher, cut, down, hung, jobs, until_jobs

Trouble = Callable[[Lab, str], AbstractContextManager[None]]
TROUBLES = pytest.mark.parametrize("trouble", [hung, down, cut])


@pytest.fixture
def launcher(strangers: Lab, request: pytest.FixtureRequest) -> Launcher:
    return Launcher(strangers, re.sub(r"\W", "_", request.node.name))


@TROUBLES
def test_site_that_falls_silent_during_submission_undoes_the_others(launcher: Launcher, trouble: Trouble) -> None:
    lab, held = launcher.lab, Held(launcher.lab, "gamma", "sha256sum")
    follower = launcher.start()
    launcher.wait(follower, lambda: held.waits, "the submission at gamma")
    with trouble(lab, "gamma"):
        held.release()
        _, stderr = follower.communicate()
        assert follower.returncode == 4, stderr
        assert "gamma: " in stderr
        assert "not undone" in stderr
        assert {site: jobs(lab, site) for site in ("alpha", "beta")} == {"alpha": [], "beta": []}
    assert not any(launcher.directory(site).exists() for site in ("alpha", "beta"))
    assert launcher.hetrl("cancel").returncode == 0  # what the cut kept from the launcher is there by now
    until_jobs(lab, NOTHING)


@TROUBLES
def test_site_that_falls_silent_during_the_run_is_unknown_and_the_run_goes_on(
    launcher: Launcher, trouble: Trouble
) -> None:
    follower = launcher.start()
    launcher.until(follower, "go")
    with trouble(launcher.lab, "beta"):
        launcher.until(follower, "site_silent")
        assert follower.poll() is None
    launcher.until(follower, "site_answers")
    assert "UNKNOWN" not in launcher.hetrl("status").stdout
    launcher.end(follower)


def test_sbatch_that_timed_out_and_queued_its_job_all_the_same_is_adopted(launcher: Launcher) -> None:
    lab, held = launcher.lab, Held(launcher.lab, "gamma", "sbatch")
    follower = launcher.start()
    launcher.wait(follower, lambda: held.waits, "sbatch at gamma")
    with hung(lab, "gamma"):  # the kernel takes the request, and slurmctld reads it when it goes on
        held.release()
        launcher.wait(follower, lambda: held.done, "the end of sbatch")
    launcher.until(follower, "go")
    until_jobs(lab, ALL_RUN)
    assert "timed out" in (launcher.directory("gamma") / ".error").read_text()
    names = lab.run("gamma", ["squeue", "--noheader", "--states=all", "--format=%j"]).stdout.split()
    assert names.count(f"hetrl-{launcher.run.name}-gamma-gang") == 1
    launcher.end(follower)


def test_site_that_refuses_at_last_undoes_the_others_and_is_quoted(launcher: Launcher) -> None:
    lab, held = launcher.lab, Held(launcher.lab, "gamma", "sbatch")
    follower = launcher.start()
    launcher.wait(follower, lambda: held.waits, "sbatch at gamma")
    update = ["scontrol", "update", "PartitionName=gpu"]
    lab.run("gamma", [*update, "State=INACTIVE"], user="root")
    try:
        held.release()
        _, stderr = follower.communicate()
    finally:
        lab.run("gamma", [*update, "State=UP"], user="root")
    assert follower.returncode == 1, stderr
    assert "gamma: gang was not accepted: Batch job submission failed: Required partition not available" in stderr
    until_jobs(lab, NOTHING)
