from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hetrl.runtime.imports import uncollected


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Let the collector look at all objects again afterwards."""
    yield
    gc.unfreeze()


def test_nothing_is_collected_in_the_block_and_what_it_made_is_never_looked_at() -> None:
    gc.unfreeze()
    with uncollected():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    gc.unfreeze()
    with pytest.raises(ModuleNotFoundError), uncollected():
        raise ModuleNotFoundError("torch")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
