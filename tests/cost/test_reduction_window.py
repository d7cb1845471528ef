"""The reduction of gradients beside the last backward passes of unequal replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.cost.model import CostModel
from hetrl.cost.training import training_cost
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Replica, Stage
from hetrl.workload import ACTOR_TRAINING
from tests.simulator.simulate_cases import ONE_STAGE, small_plan, small_workload, trained_seconds


@pytest.mark.parametrize("slow", ["a100-80gb", "l4"])
@pytest.mark.parametrize("gbps", [5.0, 20.0])
def test_it_begins_when_the_last_replica_is_in_its_last_backward_pass(slow: str, gbps: float) -> None:
    """A slow replica with one long pass has nothing to hide it in while a fast one is at its first of many."""
    sites = (Site("a", (Node("n0", "a100-80gb", 4),)), Site("b", (Node("n0", slow, 4),)))
    topology = Topology(sites, (Link(("a", "b"), 5.0, gbps),))
    workload = small_workload(samples=80, response=replace(small_workload().response, mean=1024, maximum=1024))
    plan = small_plan(workload, ONE_STAGE, micro_batch=8)
    replicas = (Replica(64, ONE_STAGE), Replica(16, (Stage(("b/n0/0",), (0, 28)),)))
    task = replace(plan.tasks[ACTOR_TRAINING], replicas=replicas)
    plan = replace(plan, tasks={ACTOR_TRAINING: task})
    predicted = training_cost(ACTOR_TRAINING, task, CostModel(topology, workload), {})
    played, _ = trained_seconds(plan, topology, workload)
    assert predicted.parts["reduction"] > 0
    assert predicted.seconds == pytest.approx(played, rel=0.02)
