from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from hetrl.runtime.garbage import collect_rarely, uncollected


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Let the collector look at all objects again afterwards, and as often as before."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


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


def test_what_lives_on_is_seldom_looked_at_and_cycles_are_collected() -> None:
    collect_rarely()
    gc.collect()
    before = _looks()
    living = [[number] for number in range(20_000)]
    assert _looks() == before
    assert gc.get_freeze_count() > 0
    followed = weakref.ref(_Cycle())
    assert followed() is not None
    others = [[number] for number in range(60_000)]
    assert followed() is None
    assert len(living) + len(others) == 80_000


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def _looks() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())
