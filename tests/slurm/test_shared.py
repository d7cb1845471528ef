"""`hetrl submit` where clusters know of each other: one slurmdbd for all of them, and a federation."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from lab.lab import Lab
from lab.launcher import ALL_RUN, NOTHING, SITES, Launcher, everywhere, until_jobs
from lab.shape import JOB_USER_ID

ID_BITS = 26  # of a federated job id are its number, those above are its cluster's


def hosts_of_jobs(launcher: Launcher) -> dict[str, set[str]]:
    """Return on which nodes the jobs of each site run, as `hetrl status` shows it."""
    shown = re.findall(r"(\w+)/\S+ +\d+ +RUNNING on (\S+)", launcher.hetrl("status").stdout)
    return {site: {host for at, host in shown if at == site} for site in SITES}


def ids(launcher: Launcher) -> Mapping[str, set[int]]:
    found = launcher.state()["jobs"]
    return {site: {int(job["id"]) for job in found if job["site"] == site} for site in SITES}


def test_one_login_node_serves_clusters_that_share_a_slurmdbd(accounted: Lab) -> None:
    shared = accounted.directory / "shared"  # where login and compute nodes of all clusters see the same files
    shared.mkdir(exist_ok=True)
    os.chown(shared, JOB_USER_ID, JOB_USER_ID)
    keys = {site: {"ssh": "local", "cluster": site} for site in SITES}
    launcher = Launcher(accounted, "shared", keys=keys, shared=shared)
    follower = launcher.start()
    launcher.until(follower, "go")
    until_jobs(accounted, ALL_RUN)
    assert hosts_of_jobs(launcher) == {"alpha": {"alpha-1"}, "beta": {"beta-1"}, "gamma": {"gamma-1"}}
    launcher.end(follower)
    assert launcher.state()["phase"] == "finished"
    assert everywhere(accounted) == NOTHING


def test_jobs_stay_in_the_member_of_a_federation_that_they_were_meant_for(federation: Lab) -> None:
    launcher = Launcher(federation, "pinned", keys={site: {"cluster": site} for site in SITES})
    fill = ["sbatch", "--clusters=beta", "--parsable", "--exclusive", "--nodes=2", "--output=/dev/null"]
    filling = federation.run("beta", [*fill, "--wrap=sleep 600"]).stdout.partition(";")[0]
    follower = launcher.start()
    launcher.until(follower, "go")
    # The one core that beta's gang asks for is free at alpha and gamma; it does not go there.
    until_jobs(federation, {**ALL_RUN, "beta": ["PENDING", "PENDING", "RUNNING"]})
    assert {number >> ID_BITS for of_site in ids(launcher).values() for number in of_site} == {1, 2, 3}
    federation.run("beta", ["scancel", filling])
    until_jobs(federation, ALL_RUN)
    assert launcher.hetrl("cancel").returncode == 0
    until_jobs(federation, NOTHING)
    follower.communicate()
    assert launcher.state()["phase"] == "cancelled"


def test_member_of_a_federation_that_is_not_named_is_refused_before_anything_is_submitted(federation: Lab) -> None:
    launcher = Launcher(federation, "unnamed")
    _, stderr = launcher.start().communicate()
    for site in SITES:
        assert f"{site}: cluster: is a member of a federation, which may start a job at another member" in stderr
    assert "set cluster: beta in the site's file" in stderr
    assert everywhere(federation) == NOTHING
