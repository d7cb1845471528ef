"""An engine that is closed lets go of megatron's groups: each has a thread that would wait for peers that are gone."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from tests.engines.megatron.megatron_worlds import LAYOUTS, Worlds, model_config, step_job


def loops(rank: int, port: int, argument: Any) -> int:
    """Return how many threads of gloo this process has."""
    gc.collect()
    return sum("gloo_tcp" in (thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir())


def test_closed_engines_leave_no_groups_behind(worlds: Worlds) -> None:
    job = step_job(model_config(), LAYOUTS["data"])
    worlds.outcome(job)
    before = worlds.run(loops, 2, None)
    for _ in range(2):
        worlds.outcome(job)
    # A world's own group may stay; megatron makes sixteen.
    after = worlds.run(loops, 2, None)
    assert max(after) - max(before) <= 4, (before, after)
