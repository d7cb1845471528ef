"""What shares wires: trainings whose gradients cross one link, copies of a version that leave one node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hetrl.cost.cycle import yielding_seconds
from hetrl.cost.iteration import link_sharing, predict, settled_seconds, sync_costs, task_cost, task_costs
from hetrl.cost.model import CostModel
from hetrl.cost.network import link_seconds
from hetrl.cost.training import Cost
from hetrl.cost.weight_sync import weight_routes, weight_sync_cost
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.plan.plan import Group, Plan, Replica, Stage, TaskPlan
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, OLD_LOGPROBS, WEIGHT_SYNC
from tests.plan.plan_cases import plan as whole_plan, workload


def over(engine: str, *devices: str, recompute: str = "none") -> TaskPlan:
    """Return a task with a replica on each device."""
    replicas = tuple(Replica(32, (Stage((device,), (0, 28)),)) for device in devices)
    return TaskPlan(engine, replicas, recompute=recompute)


def two_trainings() -> tuple[Plan, CostModel]:
    """Return a plan that trains actor and critic, each over the sites a and b; the critic takes longer."""
    nodes = tuple(Node(f"n{index}", "a100-80gb", 1) for index in range(2))
    topology = Topology(tuple(Site(name, nodes) for name in "ab"), (Link(("a", "b"), delay_ms=1, gbps=10),))
    tasks = {
        ACTOR_TRAINING: over("megatron", "a/n0/0", "b/n0/0"),
        CRITIC_TRAINING: over("megatron", "a/n1/0", "b/n1/0", recompute="full"),
    }
    groups = tuple(Group((name,), task.devices) for name, task in tasks.items())
    job = replace(workload(), algorithm="ppo", critic=workload().actor)
    return replace(whole_plan(), tasks=tasks, groups=groups), CostModel(topology, job)


def steps_seconds(cost: Cost) -> float:
    """Return what the steps take, behind the pass that scores the batch."""
    return cost.seconds - cost.parts.get(OLD_LOGPROBS, 0.0)


def test_trainings_share_a_link_until_the_first_has_ended() -> None:
    plan, model = two_trainings()
    alone = {name: task_cost(name, task, model) for name, task in plan.tasks.items()}
    sharing = link_sharing(plan, alone)
    assert sharing == {("a", "b"): 2, ("b", "a"): 2}
    slowed = {name: task_cost(name, task, model, sharing) for name, task in plan.tasks.items()}
    both = task_costs(plan, model)
    first, alone_seconds, slowed_seconds, longer_seconds = (
        steps_seconds(cost)
        for cost in (both[ACTOR_TRAINING], alone[CRITIC_TRAINING], slowed[CRITIC_TRAINING], both[CRITIC_TRAINING])
    )
    assert both[ACTOR_TRAINING] == slowed[ACTOR_TRAINING]
    assert max(first, alone_seconds) < longer_seconds < slowed_seconds
    work = first / slowed_seconds + (longer_seconds - first) / alone_seconds
    assert work == pytest.approx(1)
    assert sum(both[CRITIC_TRAINING].parts.values()) == pytest.approx(both[CRITIC_TRAINING].seconds)
    assert both[CRITIC_TRAINING].wan_bytes == alone[CRITIC_TRAINING].wan_bytes


def test_scoring_the_batch_ahead_of_the_steps_is_not_slowed() -> None:
    plan, model = two_trainings()
    alone = task_cost(ACTOR_TRAINING, plan.tasks[ACTOR_TRAINING], model)
    assert task_costs(plan, model)[ACTOR_TRAINING].parts[OLD_LOGPROBS] == alone.parts[OLD_LOGPROBS] > 0


def test_copies_for_several_sites_leave_over_the_interface_of_the_node_that_holds_the_weights() -> None:
    sites = tuple(
        Site(name, tuple(Node(f"n{index}", "a100-80gb", 1, nic_gbps=8) for index in range(2))) for name in "abc"
    )
    links = tuple(Link(ends, delay_ms=0, gbps=8) for ends in (("a", "b"), ("a", "c"), ("b", "c")))
    job = workload()
    size = job.actor.parameters * job.weight_bytes

    def seconds(*rollouts: str) -> float:
        tasks = {ACTOR_TRAINING: over("megatron", "a/n0/0"), ACTOR_GENERATION: over("vllm", *rollouts)}
        return weight_sync_cost(weight_routes(tasks), tasks, CostModel(Topology(sites, links), job)).transfer_seconds

    assert seconds("b/n0/0") == pytest.approx(size / 1e9)
    assert seconds("b/n0/0", "c/n0/0") == pytest.approx(2 * size / 1e9)
    assert seconds("b/n0/0", "c/n0/0", "a/n1/0") == pytest.approx(3 * size / 1e9)


def pipelined(**changes: Any) -> tuple[Plan, CostModel]:
    """Return a plan of long prompts and short responses whose training and versions go from a to b."""
    sites = tuple(Site(name, (Node("n", "a100-80gb", 2),)) for name in "ab")
    job = replace(workload(), prompt_tokens=2048, response=Lengths(16, 16), **changes)
    model = CostModel(Topology(sites, (Link(("a", "b"), delay_ms=0, gbps=2.5),)), job)
    stages = (Stage(("a/n/0",), (0, 14)), Stage(("b/n/0",), (14, 28)))
    tasks = {
        ACTOR_TRAINING: TaskPlan("megatron", (Replica(64, stages),)),
        ACTOR_GENERATION: over("vllm", "b/n/1"),
    }
    groups = tuple(Group((name,), task.devices) for name, task in tasks.items())
    return replace(whole_plan(), tasks=tasks, groups=groups, weight_sync=weight_routes(tasks)), model


def test_a_version_gives_way_to_the_next_batch_where_it_does_not_arrive_in_front_of_it() -> None:
    plan, model = pipelined()
    costs, syncs, way = task_costs(plan, model), sync_costs(plan, model), ("a", "b")
    training, alone = costs[ACTOR_TRAINING], syncs["actor"].transfer_seconds
    seconds, versions = settled_seconds(plan, costs, syncs, model)
    assert predict(plan, model).iteration_seconds == seconds
    assert predict(plan, model).tasks[WEIGHT_SYNC] == versions["actor"].seconds
    scoring, idle = training.parts[OLD_LOGPROBS], seconds - training.seconds
    scored, taken = (
        link_seconds(model.topology, way, load[way]) for load in (training.scored_bytes, training.wan_bytes)
    )
    steps, left = training.seconds - scoring, alone - idle - (scoring - scored)
    assert 0 <= idle < alone and left > 0
    share = 1 - (taken - scored) / steps
    assert versions["actor"].transfer_seconds == pytest.approx(idle + scoring + left / share)


def test_an_iteration_is_as_long_as_the_version_takes_that_fits_into_it() -> None:
    plan, model = pipelined(max_staleness=1)
    costs, syncs = task_costs(plan, model), sync_costs(plan, model)
    seconds, versions = settled_seconds(plan, costs, syncs, model)
    again, _ = settled_seconds(
        plan, {**costs, ACTOR_TRAINING: replace(costs[ACTOR_TRAINING], wan_bytes={})}, versions, model
    )
    assert seconds == pytest.approx(again, rel=1e-3)


def test_a_version_of_mode_sync_has_the_links_to_itself() -> None:
    plan, model = pipelined(mode="sync", max_staleness=0)
    costs, syncs = task_costs(plan, model), sync_costs(plan, model)
    assert settled_seconds(plan, costs, syncs, model)[1] == syncs


@given(st.floats(0, 100), st.floats(0, 50), st.floats(0.1, 50), st.floats(0, 1))
def test_what_gives_way_waits_for_as_much_as_is_sent_meanwhile(
    alone: float, begins: float, lasts: float, share: float
) -> None:
    found = yielding_seconds(alone, [begins], [lasts], [share * lasts])
    during = min(max(found - begins, 0.0), lasts)
    assert found - share * during == pytest.approx(alone, abs=1e-9)
