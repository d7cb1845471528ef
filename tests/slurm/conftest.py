"""Clusters for the tests of the launcher: started once, and without jobs and with whole links before every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.available import skip_unless_available
from tests.lab.lab import Accounting, Lab
from tests.lab.shape import JOB_USER


@pytest.fixture
def strangers(_strangers: Lab) -> Lab:
    """Give three clusters that share nothing but ssh; the default of the launcher."""
    return _quiet(_strangers)


@pytest.fixture
def accounted(_accounted: Lab) -> Lab:
    """Give three clusters with one slurmdbd: `-M` works, from any head."""
    return _quiet(_accounted)


@pytest.fixture
def federation(_federation: Lab) -> Lab:
    """Give three members of one federation."""
    return _quiet(_federation)


@pytest.fixture(scope="session")
def _strangers() -> Iterator[Lab]:
    yield from _clusters("none")


@pytest.fixture(scope="session")
def _accounted() -> Iterator[Lab]:
    yield from _clusters("slurmdbd")


@pytest.fixture(scope="session")
def _federation() -> Iterator[Lab]:
    yield from _clusters("federation")


def _clusters(accounting: Accounting) -> Iterator[Lab]:
    skip_unless_available()
    with Lab(slurm=True, accounting=accounting) as lab:
        yield lab


def _quiet(lab: Lab) -> Lab:
    lab.restore()
    for site in lab.sites:
        lab.run(site, ["scancel", f"--user={JOB_USER}"])
    return lab
