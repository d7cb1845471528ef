"""Clusters for the tests of the launcher, and before every test without jobs and with whole links.

Strangers are started once; those that one module alone uses end with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from lab.available import skip_unless_available
from lab.lab import Accounting, Lab
from lab.shape import JOB_USER


@pytest.fixture
def strangers(_strangers: Lab) -> Iterator[Lab]:
    """Give three clusters that share nothing but ssh; the default of the launcher."""
    yield from _quiet(_strangers)


@pytest.fixture
def accounted(_accounted: Lab) -> Iterator[Lab]:
    """Give three clusters with one slurmdbd: `-M` works, from any head."""
    yield from _quiet(_accounted)


@pytest.fixture
def federation(_federation: Lab) -> Iterator[Lab]:
    """Give three members of one federation."""
    yield from _quiet(_federation)


@pytest.fixture(scope="session")
def _strangers() -> Iterator[Lab]:
    yield from _clusters("none")


@pytest.fixture(scope="module")
def _accounted() -> Iterator[Lab]:
    yield from _clusters("slurmdbd")


@pytest.fixture(scope="module")
def _federation() -> Iterator[Lab]:
    yield from _clusters("federation")


def _clusters(accounting: Accounting) -> Iterator[Lab]:
    skip_unless_available()
    with Lab(slurm=True, accounting=accounting) as lab:
        yield lab


def _quiet(lab: Lab) -> Iterator[Lab]:
    _clear(lab)
    yield lab
    _clear(lab)


def _clear(lab: Lab) -> None:
    """Give the lab its links, nodes and login shells again, and no job."""
    lab.restore()
    for site in lab.sites:
        (lab.home(site) / ".bash_profile").unlink(missing_ok=True)
        shutil.rmtree(lab.home(site) / "held", ignore_errors=True)
        lab.run(site, ["scancel", f"--user={JOB_USER}"])
