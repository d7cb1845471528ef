"""Containers of sites: what a site file may say, and the words that start a process in one."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hetrl.describe.sites import SiteFile
from launch.findings import Wish
from launch.slurm.container import login_python_of, python_of, srun_options
from launch.slurm.preconditions import questions

RUN = "/scratch/run 1/alps"


def site(container: object) -> SiteFile:
    return SiteFile.model_validate({"name": "alps", "python": "/opt/python", "container": container})


def test_an_image_alone_is_one_of_apptainer():
    assert site("/x.sif") == site({"image": "/x.sif", "runtime": "apptainer"})
    assert python_of(site("/x.sif"), RUN) == (
        *("apptainer", "exec", "--nv", "--bind", RUN, "/x.sif"),
        "/opt/python",
    )
    assert srun_options(site("/x.sif"), RUN) == ()
    assert python_of(site(None), RUN) == login_python_of(site(None)) == ("/opt/python",)


def test_binds_and_options_of_apptainer_stand_in_front_of_the_image():
    file = site({"image": "/x.sif", "binds": ["/data", "/hf:/root/hf:ro"], "options": ["--no-home"]})
    binds = ("--bind", "/data", "--bind", "/hf:/root/hf:ro")
    assert python_of(file, RUN)[5:] == (*binds, "--no-home", "/x.sif", "/opt/python")
    assert login_python_of(file) == ("apptainer", "exec", *binds, "--no-home", "/x.sif", "/opt/python")


def test_srun_starts_containers_of_pyxis_and_only_jobs_can():
    file = site({"image": "/x.sqsh", "runtime": "pyxis", "binds": ["/hf:/root/hf:ro", "/data"], "options": ["--x"]})
    assert python_of(file, RUN) == ("/opt/python",)
    options = srun_options(file, RUN)
    assert f"--container-mounts={RUN}:{RUN},/hf:/root/hf:ro,/data:/data" in options
    assert options[0] == "--container-image=/x.sqsh"
    assert options[-1] == "--x"
    assert login_python_of(file) is None
    assert "\nversions=()\n" in questions(file, Wish(3600.0, {}))


def test_podman_shares_network_memory_and_environment_of_the_node_and_the_runs_directory():
    file = site({"image": "registry/hetrl:1", "runtime": "podman-hpc", "binds": ["/data"], "options": ["--pull=never"]})
    words = python_of(file, RUN)
    assert words[:3] == ("podman-hpc", "run", "--rm")
    assert {"--gpu", "--network=host", "--ipc=host", "--env-host", "--env=PYTHONPATH", f"--workdir={RUN}"} < set(words)
    assert {f"--volume={RUN}:{RUN}", "--volume=/data:/data"} < set(words)
    assert words[-3:] == ("--pull=never", "registry/hetrl:1", "/opt/python")
    login = login_python_of(file)
    assert login == ("podman-hpc", "run", "--rm", "--volume=/data:/data", *words[-3:])


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"runtime": "apptainer"}, "image"),
        ({"image": "/x", "runtime": "docker"}, "podman-hpc"),
        ({"image": "/x", "binds": ["/a,/b"]}, "pattern"),
        ({"image": "/x", "bind": ["/a"]}, "bind"),
        ({"image": "/x\n", "runtime": "pyxis"}, "line break"),
    ],
)
def test_what_is_no_container_is_refused(container, said):
    with pytest.raises(ValidationError, match=said):
        site(container)
