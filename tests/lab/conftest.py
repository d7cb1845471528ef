from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.available import skip_unless_available
from lab.lab import Lab


@pytest.fixture
def lab(_lab: Lab) -> Lab:
    """Give a lab without Slurm, with the links of the default."""
    _lab.restore()
    return _lab


@pytest.fixture(scope="session")
def _lab() -> Iterator[Lab]:
    skip_unless_available()
    with Lab() as lab:
        yield lab


@pytest.fixture(scope="session")
def clusters() -> Iterator[Lab]:
    """Give three clusters that are strangers to each other."""
    skip_unless_available()
    with Lab(slurm=True) as lab:
        yield lab
