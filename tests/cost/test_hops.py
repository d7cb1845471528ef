"""Hops of several replicas over the same wires: what each gets, and what that costs where it is played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.cost.hops import hops_of
from hetrl.cost.model import CostModel
from hetrl.cost.stages import place_all
from hetrl.cost.training import inference_cost, training_cost
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Plan, Replica, Stage
from tests.simulator.simulate_cases import ONE_STAGE, small_plan, small_workload, trained_seconds

DELAY_MS = 10.0


def sites(gbps: float, uplinks: tuple[float | None, ...] = (None, None)) -> Topology:
    """Two nodes at either site; the second one of b has the second uplink, the others the first one."""
    own, other = uplinks
    site_a = Site("a", tuple(Node(f"n{index}", "a100-80gb", 2, wan_gbps=own) for index in range(2)))
    site_b = Site("b", (Node("n0", "a100-80gb", 2, wan_gbps=own), Node("n1", "a100-80gb", 2, wan_gbps=other)))
    return Topology((site_a, site_b), (Link(("a", "b"), DELAY_MS, gbps),))


def across(samples: tuple[int, ...]) -> Plan:
    """Replica i goes from device i of a to that of b."""
    plan = small_plan(small_workload(samples=sum(samples)), ONE_STAGE)
    replicas = [
        Replica(count, (Stage((f"a/n{i // 2}/{i % 2}",), (0, 20)), Stage((f"b/n{i // 2}/{i % 2}",), (20, 28))))
        for i, count in enumerate(samples)
    ]
    return replace(plan, tasks={"actor_training": replace(plan.tasks["actor_training"], replicas=tuple(replicas))})


def hop_gbps(topology: Topology, samples: tuple[int, ...], back: bool = True, tasks: int = 1) -> list[float]:
    model = CostModel(topology, small_workload(samples=sum(samples)))
    replicas = place_all("actor_training", across(samples).tasks["actor_training"].replicas, model)
    hops = hops_of(replicas, samples, topology, {("a", "b"): tasks}, back)
    found = []
    for placed, count in zip(replicas, samples, strict=True):
        first, last = hops.shared(placed, count)
        assert first.hop is not None and last.hop is None and first.hop.delay_ms == DELAY_MS
        found.append(first.hop.gbps)
    return found


def test_alike_replicas_get_equal_parts_of_a_link_and_of_what_other_tasks_leave() -> None:
    assert hop_gbps(sites(12.0), (8, 8, 8, 8)) == [3.0] * 4
    assert hop_gbps(sites(12.0), (8, 8), tasks=2) == [3.0] * 2


def test_a_replica_is_disturbed_for_as_long_as_the_other_has_something_to_send() -> None:
    assert hop_gbps(sites(12.0), (12, 4)) == pytest.approx([12 / (1 + 1 / 3), 6.0])


def test_an_uplink_is_shared_by_the_replicas_of_its_node_alone() -> None:
    assert hop_gbps(sites(12.0, (1.0, 1.0)), (8, 8, 8, 8)) == [0.5] * 4
    assert hop_gbps(sites(12.0, (None, 2.0)), (8, 8, 8, 8)) == [3.0, 3.0, 1.0, 1.0]


def test_a_node_in_the_middle_sends_activations_on_and_gradients_back() -> None:
    topology = sites(100.0, (6.0, 6.0))
    stages = [Stage((device,), (7 * i, 7 * i + 7)) for i, device in enumerate(("a/n0/0", "b/n0/0", "a/n1/0"))]
    model = CostModel(topology, small_workload())
    replicas = place_all("actor_training", [Replica(16, tuple(stages))], model)
    for back, gbps in ((False, 6.0), (True, 3.0)):  # of b/n0, which both hops end at
        shared = hops_of(replicas, [16], topology, {}, back).shared(replicas[0], 16)
        assert [stage.hop.gbps for stage in shared if stage.hop] == [gbps] * 2


def test_hops_between_nodes_of_a_site_share_their_network_cards() -> None:
    topology = Topology((Site("a", tuple(Node(f"n{index}", "a100-80gb", 4, nic_gbps=0.5) for index in range(2))),))
    stages = [(Stage((f"a/n0/{i}",), (0, 20)), Stage((f"a/n1/{i}",), (20, 28))) for i in range(4)]
    inside = (Stage(("a/n0/0",), (0, 20)), Stage(("a/n0/1",), (20, 28)))
    workload = small_workload(samples=32)
    model = CostModel(topology, workload)
    replicas = tuple(Replica(8, pair) for pair in stages)
    placed = place_all("actor_training", [*replicas, Replica(8, inside)], model)
    shared = [hops_of(placed, [8] * 5, topology, {}, back=True).shared(one, 8)[0].hop for one in placed]
    assert [hop.gbps for hop in shared if hop] == [0.5 / 4] * 4 + [2400.0]
    plan = small_plan(workload, ONE_STAGE)
    plan = replace(plan, tasks={"actor_training": replace(plan.tasks["actor_training"], replicas=replicas)})
    alike = replace(workload, response=replace(workload.response, mean=workload.response.maximum))
    predicted = training_cost("actor_training", plan.tasks["actor_training"], CostModel(topology, alike), {})
    played, _ = trained_seconds(plan, topology, workload)
    assert predicted.seconds == pytest.approx(played, rel=0.05)


def test_inferences_share_network_cards_as_trainings_do() -> None:
    def seconds(nic_gbps: float, count: int) -> float:
        nodes = tuple(Node(f"n{index}", "a100-80gb", 4, nic_gbps=nic_gbps) for index in range(2))
        stages = [(Stage((f"a/n0/{i}",), (0, 20)), Stage((f"a/n1/{i}",), (20, 28))) for i in range(count)]
        workload = small_workload(samples=8 * count)
        task = replace(
            small_plan(workload, ONE_STAGE).tasks["actor_training"],
            replicas=tuple(Replica(8, pair) for pair in stages),
        )
        return inference_cost("actor_training", task, CostModel(Topology((Site("a", nodes),)), workload)).seconds

    assert seconds(0.5, 4) == pytest.approx(seconds(0.5 / 4, 1))
    assert seconds(0.5, 4) > 2 * seconds(0.5, 1)


@pytest.mark.parametrize(
    ("topology", "samples"),
    [
        pytest.param(sites(0.5), (8, 8, 8, 8), id="link"),
        pytest.param(sites(0.5), (20, 4, 4, 4), id="unequal"),
        pytest.param(sites(5.0, (0.3, 0.3)), (8, 8, 8, 8), id="uplinks"),
        pytest.param(sites(2.0, (None, 0.3)), (8, 8, 8, 8), id="one uplink"),
    ],
)
def test_a_training_over_shared_wires_takes_as_long_as_it_plays(topology: Topology, samples: tuple[int, ...]) -> None:
    plan, workload = across(samples), small_workload(samples=sum(samples))
    played, _ = trained_seconds(plan, topology, workload)
    alike = replace(workload, response=replace(workload.response, mean=workload.response.maximum))
    predicted = training_cost("actor_training", plan.tasks["actor_training"], CostModel(topology, alike), {})
    assert predicted.seconds == pytest.approx(played, rel=0.05)
