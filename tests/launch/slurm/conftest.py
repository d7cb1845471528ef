"""A run over the three clusters that was submitted once, for all tests of a process that begin behind it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.slurm.slurm_cases import Clusters, environment, make_clusters, submit


@pytest.fixture(scope="session")
def first_submitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Submit a run; returns where the clusters must lie, for their files name it, and a copy of them."""
    path = tmp_path_factory.mktemp("submitted")
    with environment(make_clusters(path / "clusters")) as made:
        submit(made)
    return path / "clusters", shutil.copytree(path / "clusters", path / "copy", symlinks=True)


@pytest.fixture
def submitted(first_submitted: tuple[Path, Path]) -> Iterator[Clusters]:
    """Give the clusters as they are behind a submission."""
    path, copy = first_submitted
    shutil.rmtree(path)
    shutil.copytree(copy, path, symlinks=True)
    with environment(Clusters(path)) as made:
        yield made
    while left := programs_of(path):  # that the launcher gave up, and that would write into the next test's files
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)


def programs_of(path: Path) -> list[psutil.Process]:
    """Return the processes that were started in the environment of the clusters at a path."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FAKE_CLUSTERS") == str(path):
                found.append(process)
    return found
