"""What a server of generation gets is what its own replica says in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetrl.plan.plan import Group, Plan, Replica, Stage, TaskPlan
from hetrl.runtime.run.context import Context
from hetrl.runtime.run.rollout import settings_of
from hetrl.runtime.vllm.command import command_of, environment_of
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


def command(directory: Path, idle_state: str, shared: bool) -> list[str]:
    """Return how a GPU server of two stages is started, beside the trainer or alone."""
    plan = quick_plan()
    stages = (Stage(("alpha/alpha-0/0",), (0, 1)), Stage(("alpha/alpha-0/1",), (1, 2)))
    server = TaskPlan("vllm", (Replica(16, stages, 0.1, 8),), idle_state=idle_state)
    groups = (Group(("actor_training", GENERATION), server.devices),) if shared else plan.groups
    plan = replace(plan, groups=groups, tasks={**plan.tasks, GENERATION: server})
    gpus = dict.fromkeys(server.devices, "h100")
    experiment = quick_experiment(model={"architecture": "tiny-qwen3"})
    settings = settings_of(Context(directory, "r", "alpha", "alpha", "", gpus, {}, experiment, plan), 0, directory)
    assert environment_of(settings, directory)["VLLM_PP_LAYER_PARTITION"] == "1,1"
    return command_of(settings, directory)


@pytest.mark.parametrize("idle_state", ["sleep", "offload"])
def test_a_server_can_sleep_where_it_has_to(tmp_path: Path, idle_state: str) -> None:
    assert "--enable-sleep-mode" in command(tmp_path, idle_state, shared=True)
    assert "--enable-sleep-mode" not in command(tmp_path, "resident", shared=True)
    assert "--enable-sleep-mode" not in command(tmp_path, idle_state, shared=False)


def test_a_server_starts_beside_others_and_gets_the_stages_of_the_plan(tmp_path: Path) -> None:
    words = command(tmp_path, "sleep", shared=True)
    assert float(words[words.index("--gpu-memory-utilization") + 1]) < 0.1
    assert words[words.index("--pipeline-parallel-size") + 1] == "2"
