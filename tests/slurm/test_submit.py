"""`hetrl submit` on three real clusters that share nothing but ssh: start, follow, come back, end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lab.lab import Lab
from lab.launcher import ALL_RUN, COUNTS, NOTHING, Held, Launcher, everywhere, jobs, kill, until_jobs
from lab.shape import JOB_USER


@pytest.fixture
def launcher(strangers: Lab, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    yield Launcher(strangers, re.sub(r"\W", "_", request.node.name), getattr(request, "param", {}))


def test_run_is_submitted_followed_and_comes_home(launcher: Launcher) -> None:
    follower = launcher.start()
    launcher.until(follower, "go")
    until_jobs(launcher.lab, ALL_RUN)
    shown = launcher.hetrl("status").stdout
    assert "gamma/gang" in shown
    assert "RUNNING on gamma-1" in shown
    carried = launcher.directory("alpha") / "peers/gamma.endpoint"
    launcher.wait(follower, carried.exists, "the address of gamma's gateway at alpha")
    assert carried.read_text() == "tcp://gamma-1:7001\n"
    launcher.end(follower)
    assert launcher.state()["phase"] == "finished"
    assert {job["state"] for job in launcher.state()["jobs"]} == {"COMPLETED"}
    assert (launcher.run / "logs/gamma/gateway.log").read_text() == "up on gamma-1\n"
    assert everywhere(launcher.lab) == NOTHING


def test_a_look_at_a_site_is_one_squeue_of_two_requests(launcher: Launcher) -> None:
    """The jobs of the user, and the partitions, without which no squeue does; nothing of a federation.

    And those in a partition that is hidden, which else would be taken for jobs that Slurm has forgotten.
    """
    lab = launcher.lab
    follower = launcher.start()
    launcher.until(follower, "go")
    lab.run("gamma", ["scontrol", "update", "PartitionName=gpu", "Hidden=YES"], user="root")
    squeue = Held(lab, "gamma", "squeue")  # counts from here on: the next look waits in it
    launcher.wait(follower, lambda: squeue.waits, "a look at gamma")
    lab.run("gamma", ["sdiag", "--reset"], user="root")
    squeue.release()
    launcher.wait(follower, lambda: squeue.calls >= 4, "more looks at gamma")
    requests = requests_of(lab, "gamma")
    assert 3 <= requests <= 2 * squeue.calls
    assert not lab.run("gamma", ["squeue", "--local", "--noheader"]).stdout
    lab.run("gamma", ["scontrol", "update", "PartitionName=gpu", "Hidden=NO"], user="root")
    launcher.end(follower)
    assert {job["state"] for job in launcher.state()["jobs"]} == {"COMPLETED"}


def requests_of(lab: Lab, site: str) -> int:
    """Return how many requests the job user's programs have made to a controller since its statistics were reset."""
    by_user = lab.run(site, ["sdiag"], user="root").stdout.partition("statistics by user")[2]
    found = re.search(rf"{JOB_USER}\s.*?count:(\d+)", by_user)
    return int(found[1]) if found else 0


def test_job_that_fails_ends_the_others(launcher: Launcher) -> None:
    follower = launcher.start()
    launcher.until(follower, "go")
    launcher.tell("alpha", "fail")
    _, stderr = follower.communicate()
    assert follower.returncode == 1
    assert "alpha: gang (job" in stderr
    assert "RuntimeError: told to fail" in stderr
    until_jobs(launcher.lab, NOTHING)


def test_job_that_has_but_rollouts_fails_and_the_others_go_on(launcher: Launcher) -> None:
    follower = launcher.start()
    launcher.until(follower, "go")
    launcher.tell("gamma", "fail")
    launcher.until(follower, "process_exited")
    until_jobs(launcher.lab, {**ALL_RUN, "gamma": []})
    launcher.end(follower)
    states = {(job["site"], job["state"]) for job in launcher.state()["jobs"]}
    assert states == {("alpha", "COMPLETED"), ("beta", "COMPLETED"), ("gamma", "FAILED")}


@pytest.mark.parametrize("program", ["sha256sum", "sbatch", None], ids=["copied", "at-sbatch", "submitted"])
def test_launcher_that_is_killed_leaves_a_run_that_another_one_takes_over(
    launcher: Launcher, program: str | None
) -> None:
    held = Held(launcher.lab, "gamma", program) if program else None
    first = launcher.start()
    if held is None:
        launcher.until(first, "submitted")
    else:
        launcher.wait(first, lambda: held.waits, f"{program} at gamma")
    kill(first)
    if held is not None:
        held.release()  # what the first one left behind at gamma goes on, beside the second
    done = launcher.hetrl("resume", "--detach")
    assert done.returncode == 0, done.stderr
    assert {site: len(found) for site, found in everywhere(launcher.lab).items()} == COUNTS
    assert launcher.kinds().count("submitted") == sum(COUNTS.values())
    launcher.end(launcher.start("resume"))
    assert everywhere(launcher.lab) == NOTHING


@pytest.mark.parametrize("launcher", [{"queue_timeout": "00:00:02"}], indirect=True)
def test_site_that_never_starts_gives_the_nodes_of_the_others_back(launcher: Launcher) -> None:
    lab = launcher.lab
    lab.run("alpha", ["sbatch", "--exclusive", "--nodes=2", "--wrap=sleep 600"])
    follower = launcher.start()
    _, stderr = follower.communicate()
    assert follower.returncode == 6, stderr
    assert "alpha: gang still waits" in stderr
    until_jobs(lab, {"alpha": ["RUNNING"], "beta": [], "gamma": []})


def test_cancel_reaches_what_it_can_and_says_what_remains(launcher: Launcher) -> None:
    lab = launcher.lab
    follower = launcher.start()
    launcher.until(follower, "go")
    kill(follower)
    lab.cut("alpha", "gamma")
    done = launcher.hetrl("cancel")
    assert done.returncode == 5, done.stderr
    assert "gamma: " in done.stderr
    lab.heal("alpha", "gamma")
    assert jobs(lab, "gamma") == ["RUNNING"]
    assert launcher.hetrl("cancel").returncode == 0
    until_jobs(lab, NOTHING)
