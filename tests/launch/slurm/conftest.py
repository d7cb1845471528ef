"""A run over the three clusters that was submitted once, for all tests of a process that begin behind it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.slurm.slurm_cases import Clusters, environment, make_clusters, submit
from tests.runs import processes_where


@pytest.fixture(scope="session")
def first_submitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return clusters behind a submission, to be copied to `clusters` beside them, which their files name."""
    path = tmp_path_factory.mktemp("submitted") / "clusters"
    with environment(make_clusters(path)) as made:
        submit(made)
    return path.rename(path.with_name("copied"))


@pytest.fixture
def submitted(first_submitted: Path) -> Iterator[Clusters]:
    """Give the clusters as they are behind a submission."""
    path = shutil.copytree(first_submitted, first_submitted.with_name("clusters"), symlinks=True)
    with environment(Clusters(path)) as made:
        yield made
    while left := processes_where("FAKE_CLUSTERS", str(path).__eq__):  # that the launcher gave up, and that still write
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)
    shutil.rmtree(path)
