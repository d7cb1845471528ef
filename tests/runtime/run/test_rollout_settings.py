"""What a server of generation gets is what its own replica says in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrl.plan.plan import Plan
from hetrl.runtime.run.context import Context
from hetrl.runtime.run.rollout import settings_of
from lab.quick import quick_plan
from tests.launch.launch_cases import quick_experiment, quick_gpus

GENERATION = "actor_generation"


def unequal_servers() -> Plan:
    task = quick_plan().tasks[GENERATION]
    first, second = task.replicas
    replicas = (
        replace(first, kv_cache_gb=73.6, max_sequences=256),
        replace(second, kv_cache_gb=0.0009, max_sequences=8),
    )
    return replace(quick_plan(), tasks={**quick_plan().tasks, GENERATION: replace(task, replicas=replicas)})


@pytest.mark.parametrize(("replica", "kv_cache_bytes", "sequences"), [(0, 73_600_000_000, 256), (1, 900_000, 8)])
def test_a_server_gets_the_cache_and_the_sequences_of_its_own_replica(
    tmp_path: Path, replica: int, kv_cache_bytes: int, sequences: int
) -> None:
    plan = unequal_servers()
    experiment = quick_experiment(model={"architecture": "tiny-qwen3"})
    context = Context(tmp_path, "run", "beta", "alpha", "", quick_gpus(plan), {}, experiment, plan)
    settings = settings_of(context, replica, tmp_path)
    assert (settings.kv_cache_bytes, settings.max_sequences) == (kv_cache_bytes, sequences)
