"""The clusters of the lab, with real Slurm daemons."""

from __future__ import annotations

import re
import sys

import pytest

from lab.available import skip_unless_available
from lab.lab import Lab
from lab.shape import JOB_USER_ID

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


def test_every_site_is_a_cluster_of_its_own(clusters: Lab) -> None:
    for site, nodes in (("alpha", "alpha-1 alpha-2"), ("beta", "beta-1 beta-2"), ("gamma", "gamma-1")):
        names = clusters.run(site, ["sinfo", "--noheader", "--partition=gpu", "--Node", "--format=%N"]).stdout
        assert names.split() == nodes.split()
        # Strangers: the job ids of all start at 1.
        job = clusters.run(site, ["sbatch", "--parsable", "--output=/dev/null", "--wrap=true"]).stdout
        assert job == "1\n"


def test_a_credential_of_one_cluster_is_nothing_in_another(clusters: Lab) -> None:
    credential = clusters.run("alpha", ["munge", "--no-input"]).stdout
    assert clusters.run("alpha-2", ["unmunge"], input=credential, check=False).returncode == 0
    assert clusters.run("beta", ["unmunge"], input=credential, check=False).returncode != 0


def test_a_step_runs_on_two_nodes_with_its_gpus(clusters: Lab) -> None:
    show = ["sh", "-c", "echo $(hostname) $(id --user) $CUDA_VISIBLE_DEVICES"]
    done = clusters.run("beta", ["srun", "--nodes=2", "--gres=gpu:l40s:2", *show])
    assert sorted(done.stdout.splitlines()) == [f"beta-1 {JOB_USER_ID} 0,1", f"beta-2 {JOB_USER_ID} 0,1"]


def test_a_batch_job_runs_python_and_its_return_code_comes_back(clusters: Lab) -> None:
    wrap = f"--wrap={sys.executable} -c 'import hetrl; print(hetrl.__name__)'; exit 7"
    options = ["--wait", "--gres=gpu:a100:4", "--output=/home/labuser/job.log"]
    assert clusters.run("alpha", ["sbatch", *options, wrap], check=False).returncode == 7
    assert (clusters.home("alpha") / "job.log").read_text() == "hetrl\n"


def test_a_gpu_that_the_cluster_lacks_is_refused(clusters: Lab) -> None:
    for gpus in ("gpu:h100:1", "gpu:l4:5"):
        refused = clusters.run("gamma", ["sbatch", f"--gres={gpus}", "--wrap=true"], check=False)
        assert refused.returncode != 0
        assert "Requested node configuration is not available" in refused.stderr


def test_a_job_starts_a_job_at_another_site_over_ssh(clusters: Lab) -> None:
    done = clusters.run("alpha", ["srun", "ssh", "-o", "BatchMode=yes", "gamma", "srun hostname"])
    assert done.stdout == "gamma-1\n"


def test_a_killed_node_takes_jobs_again_after_its_start(clusters: Lab) -> None:
    clusters.kill_node("beta-1")
    clusters.start_node("beta-1")
    assert clusters.run("beta", ["srun", "--nodelist=beta-1", "hostname"]).stdout == "beta-1\n"


def test_clusters_with_one_slurmdbd_take_jobs_for_each_other() -> None:
    skip_unless_available()
    with Lab(accounting="slurmdbd") as lab:
        options = ["--clusters=gamma", "--parsable", "--wait", "--output=/home/labuser/job.log", "--wrap=hostname"]
        assert lab.run("beta", ["sbatch", *options]).stdout == "1;gamma\n"
        assert (lab.home("gamma") / "job.log").read_text() == "gamma-1\n"
        listed = lab.run("alpha", ["squeue", "--clusters=all"]).stdout
        assert re.findall(r"CLUSTER: (\w+)", listed) == ["alpha", "beta", "gamma"]


def test_a_federation_shares_its_job_ids() -> None:
    skip_unless_available()
    with Lab(accounting="federation") as lab:
        options = ["--clusters=beta", "--parsable", "--output=/dev/null", "--wrap=sleep 60"]
        job = lab.run("alpha", ["sbatch", *options]).stdout.partition(";")[0].strip()
        assert int(job) > 1 << 26, "a federated id holds the number of its cluster above bit 26"
        listed = lab.run("gamma", ["squeue", "--federation", "--noheader", "--format=%A"]).stdout
        assert listed.split() == [job]
