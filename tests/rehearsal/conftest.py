from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.fake_cuda.ranks import Stage


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """The process that plays ranks: one for the session, for torch takes a while to start."""
    with Stage() as stage:
        yield stage
