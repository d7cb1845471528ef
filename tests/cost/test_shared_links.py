"""What shares wires: trainings whose gradients cross one link, copies of a version that leave one node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.cost.iteration import link_sharing, task_cost, task_costs
from hetrl.cost.model import CostModel
from hetrl.cost.training import Cost
from hetrl.cost.weight_sync import weight_routes, weight_sync_cost
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Group, Plan, Replica, Stage, TaskPlan
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING, OLD_LOGPROBS
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
