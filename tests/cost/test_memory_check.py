"""Memory of a plan, added up from the plan: what does not fit is refused, whatever the file says of itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrl.cost.check import PlanError, check, violations
from hetrl.cost.compute import StageShape
from hetrl.cost.efficiency import calibrated
from hetrl.cost.generation import batch_limit, server_of
from hetrl.cost.memory import (
    BLOCK_TOKENS,
    kv_cache_room_gb,
    least_kv_cache_gb,
    peak_memory_gb,
    rollout_shapes,
    with_server,
)
from hetrl.cost.model import CostModel
from hetrl.cost.stages import place_all
from hetrl.errors import UsageError
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan, Replica
from hetrl.workload import architecture
from tests.plan.plan_cases import plan, topology, workload

GENERATION, L4 = "actor_generation", 2  # the replica on the L4
MODEL = CostModel(topology(), workload())


def served(index: int, whole: Plan | None = None, **changes: Any) -> Plan:
    """Return the plan with other figures for one server of generation."""
    whole = whole or plan()
    task = whole.tasks[GENERATION]
    replicas = [replace(one, **changes) if at == index else one for at, one in enumerate(task.replicas)]
    return replace(whole, tasks={**whole.tasks, GENERATION: replace(task, replicas=tuple(replicas))})


def room_gb(replica: Replica) -> float:
    return kv_cache_room_gb(rollout_shapes(replica, MODEL), replica.max_sequences, MODEL.workload)


def test_the_base_plan_fits() -> None:
    check(plan(), MODEL)


def test_weights_workspace_and_cache_fill_a_gpu_exactly_and_no_more() -> None:
    replica = plan().tasks[GENERATION].replicas[L4]
    room, usable = room_gb(replica), calibrated().rates("l4").usable_gb
    full = served(L4, kv_cache_gb=room)
    assert peak_memory_gb(full, MODEL)["lab/l4-0/0"] == pytest.approx(usable, rel=1e-12)
    check(full, MODEL)
    (line,) = violations(served(L4, kv_cache_gb=room + 0.01), MODEL)
    assert line.startswith(f"lab/l4-0/0: needs {usable + 0.01:.2f} GB; usable are {usable:.2f} of 24 GB of l4")
    assert GENERATION in line


def test_a_cache_that_was_raised_by_hand_is_refused_whatever_the_file_predicts() -> None:
    raised = served(L4, kv_cache_gb=73.6)
    low = dict.fromkeys(raised.predicted.peak_memory_gb, 0.1)
    raised = replace(raised, predicted=replace(raised.predicted, peak_memory_gb=low))
    with pytest.raises(PlanError) as caught:
        check(raised, MODEL)
    assert isinstance(caught.value, UsageError) and caught.value.exit_code == 2
    assert len(caught.value.violations) == 1 and caught.value.violations[0] in str(caught.value)


def test_a_wrong_prediction_of_a_plan_that_fits_does_not_matter() -> None:
    peaks = dict.fromkeys(plan().predicted.peak_memory_gb, math.nan)
    check(replace(plan(), predicted=replace(plan().predicted, peak_memory_gb=peaks)), MODEL)


def test_more_sequences_need_more_workspace() -> None:
    replica = plan().tasks[GENERATION].replicas[L4]
    full = served(L4, kv_cache_gb=room_gb(replica))
    assert violations(served(L4, full, max_sequences=256), MODEL)


def test_what_else_is_resident_counts() -> None:
    """The cache of a replica beside the reward model has to leave room for it."""
    whole, moved = plan(), plan().tasks[GENERATION].replicas[0]
    room = room_gb(moved)
    reward = whole.tasks["reward_inference"]
    beside = replace(reward, replicas=tuple(replace(one, stages=moved.stages) for one in reward.replicas))
    group = replace(whole.groups[1], tasks=(GENERATION, "reward_inference"), job="gang")
    alone = served(0, kv_cache_gb=room)
    for state, count in (("resident", 1), ("offload", 0)):
        sleeping = replace(alone.tasks[GENERATION], idle_state="sleep")
        tasks = {**alone.tasks, GENERATION: sleeping, "reward_inference": replace(beside, idle_state=state)}
        together = replace(alone, tasks=tasks, groups=(whole.groups[0], group))
        assert len(violations(together, MODEL)) == count


def test_a_server_that_cannot_hold_one_sequence_is_told_the_figure_that_it_needs() -> None:
    (line,) = violations(served(1, kv_cache_gb=0.05), MODEL)
    assert line.startswith(f"{GENERATION}, replica 1: kv_cache_gb is 0.05; a sequence of 768 tokens needs ")
    figure = float(line.split("needs ")[1].split()[0])
    assert violations(served(1, kv_cache_gb=figure), MODEL) == []
    assert violations(served(1, kv_cache_gb=figure - 2e-6), MODEL)


@given(st.integers(1, 5000), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from(["qwen3-1.7b", "llama-2-7b"]))
def test_the_least_cache_is_whole_blocks_of_one_sequence_and_one_more(tokens: int, tensor: int, name: str) -> None:
    shape = StageShape(architecture(name), 7, True, False, True, tensor, calibrated().rates("l4"))
    job = replace(workload(), prompt_tokens=0, response=replace(workload().response, mean=tokens, maximum=tokens))
    blocks = least_kv_cache_gb([shape], job) * 1e9 / shape.kv_bytes_per_token / BLOCK_TOKENS
    assert blocks == pytest.approx(round(blocks))
    assert BLOCK_TOKENS * (blocks - 2) < tokens <= BLOCK_TOKENS * (blocks - 1) * (1 + 1e-12)


@given(st.floats(0.3, 100.0), st.integers(1, 256), st.sampled_from([0, 1, 2]))
def test_a_server_gets_the_cap_or_what_there_is_room_for(cap_gb: float, sequences: int, index: int) -> None:
    replica = with_server(plan().tasks[GENERATION].replicas[index], cap_gb, sequences, MODEL)
    room = kv_cache_room_gb(rollout_shapes(replica, MODEL), sequences, MODEL.workload)
    assert replica.kv_cache_gb == min(cap_gb, room)
    (server,) = (server_of(stages) for stages in place_all(GENERATION, [replica], MODEL))
    asked = replace(replica, max_sequences=sequences)
    assert replica.max_sequences == batch_limit(server, asked, MODEL.workload) <= sequences
    check(served(index, kv_cache_gb=replica.kv_cache_gb, max_sequences=replica.max_sequences), MODEL)


def test_sequences_at_once_follow_from_the_own_cache_of_a_replica() -> None:
    replica = plan().tasks[GENERATION].replicas[L4]
    shapes = rollout_shapes(replica, MODEL)
    server = tuple((shape, None, None) for shape in shapes)
    mean_gb = MODEL.workload.sequence_tokens * shapes[0].kv_bytes_per_token / 1e9
    assert batch_limit(server, replace(replica, kv_cache_gb=5.5 * mean_gb), MODEL.workload) == 5
    assert batch_limit(server, replace(replica, kv_cache_gb=5.5 * mean_gb, max_sequences=3), MODEL.workload) == 3


def test_what_is_offloaded_fits_the_memory_of_the_node() -> None:
    sites = tuple(
        replace(site, nodes=tuple(replace(node, host_memory_gb=2.0) for node in site.nodes))
        for site in topology().sites
    )
    small = CostModel(Topology(sites, topology().links), workload())
    lines = violations(plan(), small)
    assert len(lines) == 2  # a replica on each node
    assert lines[0].startswith("alps/a100-0: idle_state offload needs ") and lines[0].endswith("the node has 2")


def test_a_plan_that_is_not_sound_is_told_of_that_first() -> None:
    lines = violations(served(0, served(L4, kv_cache_gb=73.6), max_sequences=0), MODEL)
    assert lines == [f"{GENERATION}, replica 0: max_sequences is 0; its server needs more than 0"]
