"""What crosses between sites passes one gateway each, and a site's ranks sum before it does: predicted as played."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.cost.model import CostModel
from hetrl.cost.network import Ring, reduction_of, uplink_seconds
from hetrl.cost.training import training_cost
from hetrl.cost.weight_sync import weight_routes, weight_sync_cost
from hetrl.hardware import Device, Link, Node, Site, Topology
from hetrl.plan.plan import Plan, Replica, Stage, TaskPlan
from hetrl.simulator.pipelines import Setting
from hetrl.simulator.weights import WeightSync
from hetrl.workload import Workload
from tests.simulator.simulate_cases import ONE_STAGE, setting_of, small_plan, small_workload, trained_seconds


def sites_of(nodes: dict[str, tuple[Node, ...]], gbps: float, delay_ms: float = 1.0) -> Topology:
    """Return sites with these nodes, and a link between each two."""
    links = [Link((a, b), delay_ms, gbps) for a in nodes for b in nodes if a < b]
    return Topology(tuple(Site(name, own) for name, own in nodes.items()), tuple(links))


def trained_on(devices: tuple[str, ...], workload: Workload, sharding: str = "none") -> Plan:
    plan = small_plan(workload, ONE_STAGE)
    samples = workload.samples // len(devices)
    replicas = tuple(Replica(samples, (Stage((device,), (0, 28)),)) for device in devices)
    trainer = replace(plan.tasks["actor_training"], replicas=replicas, optimizer_sharding=sharding)
    return replace(plan, tasks={**plan.tasks, "actor_training": trainer})


@pytest.mark.parametrize("sharding", ["none", "data_parallel"])
@pytest.mark.parametrize(
    "devices",
    [("a/n0/0", "b/n0/0"), ("a/n0/0", "a/n0/1", "b/n0/0"), ("a/n0/0", "a/n1/0", "b/n0/0"), ("a/n0/0", "a/n1/0")],
    ids=["one rank each", "two in a node", "two in nodes of a site", "one site"],
)
def test_a_training_over_sites_is_played_as_it_is_predicted(devices: tuple[str, ...], sharding: str) -> None:
    workload = small_workload(optimizer_steps_per_iteration=1, samples=12, ratio_to_sampler=True)
    node = Node("n0", "a100-80gb", 2, nic_gbps=10)
    topology = sites_of({"a": (node, replace(node, name="n1")), "b": (node,)}, gbps=100.0)
    plan = trained_on(devices, workload, sharding)
    predicted = training_cost("actor_training", plan.tasks["actor_training"], CostModel(topology, workload), {})
    assert trained_seconds(plan, topology, workload)[0] == pytest.approx(predicted.seconds, rel=0.03)


def test_a_network_card_carries_only_what_its_site_sums() -> None:
    node = Node("n0", "a100-80gb", 2, nic_gbps=8)  # 1 GB/s
    topology = sites_of({"a": (node, replace(node, name="n1")), "b": (node,)}, gbps=80.0)

    def seconds(*nodes: tuple[str, str]) -> float:
        devices = tuple(Device(site, name, 0, "a100-80gb") for site, name in nodes)
        return reduction_of(topology, [Ring(devices, 10e9, 5e9, False, packed=0.1)], {}).seconds

    assert seconds(("a", "n0"), ("b", "n0")) == pytest.approx(1.0, rel=0.01)  # a tenth of 10 GB between the sites
    inside = 10.0  # 2 x 1/2 of 10 GB
    assert seconds(("a", "n0"), ("a", "n1"), ("b", "n0")) == pytest.approx(inside + 1.0, rel=0.01)


def test_a_gateway_carries_all_that_leaves_its_site_and_all_that_arrives() -> None:
    loads = {("a", "b"): 1e9, ("a", "c"): 2e9, ("b", "c"): 4e9}

    def seconds(**gbps: float) -> float:
        return uplink_seconds({site: Node("n", "l4", 1, nic_gbps=own) for site, own in gbps.items()}, loads)

    assert seconds(a=8.0, b=80.0, c=80.0) == pytest.approx(3.0)
    assert seconds(a=80.0, b=80.0, c=8.0) == pytest.approx(6.0)
    assert uplink_seconds({}, {}) == 0.0


def sent_seconds(topology: Topology, plan: Plan) -> tuple[float, float]:
    """Return the seconds of a version, predicted and played."""
    setting: Setting = setting_of(topology, small_workload())
    routes = weight_routes(plan.tasks)
    predicted = weight_sync_cost(routes, plan.tasks, setting.model).transfer_seconds
    sync = WeightSync(setting, replace(plan, weight_sync=routes), "actor")
    setting.clock.run(setting.clock.start(sync.transfer()))
    return predicted, setting.clock.now


def generated_on(plan: Plan, *devices: str) -> Plan:
    replicas = tuple(Replica(8, (Stage((device,), (0, 28)),), 20.0, 64) for device in devices)
    return replace(plan, tasks={**plan.tasks, "actor_generation": TaskPlan("vllm", replicas)})


def test_a_version_from_two_sites_shares_the_uplink_that_it_arrives_at() -> None:
    node = Node("n0", "a100-80gb", 2, nic_gbps=100)
    topology = sites_of({"a": (node,), "b": (node,), "c": (replace(node, wan_gbps=2.0),)}, gbps=2.0)
    stages = (Stage(("a/n0/0",), (0, 14)), Stage(("b/n0/0",), (14, 28)))
    plan = generated_on(small_plan(small_workload(), stages), "c/n0/0")
    predicted, played = sent_seconds(topology, plan)
    size = small_workload().actor.parameters * 2
    assert predicted == pytest.approx(size * 8 / 2e9, rel=0.01)
    assert played == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("slow", ["n0", "n1"])
def test_a_version_leaves_and_arrives_at_the_best_connected_node_of_a_site(slow: str) -> None:
    """One node of each site trains, or generates, on an uplink of its own; the other one does not, and serves too."""
    nodes = tuple(
        Node(name, "a100-80gb", 2, nic_gbps=100, wan_gbps=1.0 if name == slow else None) for name in ("n0", "n1")
    )
    topology = sites_of({"a": nodes, "b": nodes}, gbps=10.0)
    plan = generated_on(small_plan(small_workload(), ONE_STAGE), "a/n1/0", "b/n0/0", "b/n1/0")
    predicted, played = sent_seconds(topology, plan)
    size = small_workload().actor.parameters * 2
    assert predicted == pytest.approx(size * 8 / 10e9, rel=0.02)
    assert played == pytest.approx(predicted, rel=0.15)  # the first chunk goes node by node
