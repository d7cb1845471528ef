from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.megatron.megatron_worlds import LAYOUTS, Outcome, Worlds, step_job


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Give the processes that run training engines, started once."""
    pool = Worlds()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def alone(worlds: Worlds) -> Callable[[dict[str, Any]], Outcome]:
    """Give a function that returns what two steps of a model on one rank come to, computed once per model."""
    known: dict[str, Outcome] = {}

    def outcome(config: dict[str, Any]) -> Outcome:
        key = repr(config)
        if key not in known:
            known[key] = worlds.outcome(step_job(config, LAYOUTS["one"]))
        return known[key]

    return outcome
