"""The files under topology/ and configs/paper-*: they load, and the scenarios hold what their source says."""

from __future__ import annotations

import csv
import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hetrl.describe.sites import NodeEntry, SiteFile, read_scenario, read_sites, topology_of
from hetrl.describe.yaml_file import read_yaml
from hetrl.hardware import Topology
from hetrl.problem import read_problem
from hetrl.workload import TASKS

ROOT = Path(__file__).parents[2]
TOPOLOGY = ROOT / "topology"
SOURCE = json.loads((TOPOLOGY / "scenarios" / "paper_scenarios.json").read_text())
SCENARIOS = ["single-region", "multi-region-hybrid", "multi-country", "multi-continent"]


def scenario(name: str) -> Topology:
    return topology_of(read_scenario(TOPOLOGY / "scenarios" / f"{name}.yaml"))


def test_the_source_has_these_scenarios() -> None:
    assert sorted(SOURCE["scenarios"]) == sorted(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nodes_are_those_of_the_source(name: str) -> None:
    source = SOURCE["scenarios"][name]
    found = {(site.name, node.name): node for site in scenario(name).sites for node in site.nodes}
    regions = dict(zip((node["name"] for node in SOURCE["nodes"]), source["region_of_node"], strict=True))
    assert set(found) == {(region, node) for node, region in regions.items()}
    for entry in SOURCE["nodes"]:
        node = found[regions[entry["name"]], entry["name"]]
        gpu = entry["gpu"]
        assert (node.gpu, node.gpus) == (gpu, entry["gpus"])
        assert (node.nic_gbps, node.peer_gbps) == (SOURCE["nic_gbps"][gpu], SOURCE["intra_node_gbps"][gpu])
        assert node.wan_gbps == (source["edge_gbps"] if gpu == source.get("edge_gpu") else None)
        assert node.host_memory_gb == {"a100-hetrl": 1152, "l40s": 1536, "l4": 768}[gpu]


@pytest.mark.parametrize("name", SCENARIOS)
def test_links_and_delays_are_those_of_the_source(name: str) -> None:
    topology = scenario(name)
    found = {(frozenset(link.between), link.delay_ms, link.gbps) for link in topology.links}
    links = SOURCE["scenarios"][name]["links"]
    assert found == {(frozenset(link["between"]), link["delay_ms"], link["gbps"]) for link in links}
    assert len(topology.links) == len(links)
    for site in topology.sites:
        assert (site.delay_ms, site.node_delay_ms) == (SOURCE["intra_region_delay_ms"], SOURCE["intra_node_delay_ms"])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_pair_of_sites_is_linked(name: str) -> None:
    topology = scenario(name)
    for one, other in combinations(topology.site_by_name, 2):
        assert topology.link(one, other) is not None


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_paper_configuration_is_its_set_up(name: str) -> None:
    problem = read_problem(ROOT / "configs" / f"paper-{name}.yaml")
    assert problem.experiment.name == f"paper-{name}"
    assert problem.topology == scenario(name)
    assert Counter(device.gpu for device in problem.topology.devices) == {"a100-hetrl": 24, "l40s": 24, "l4": 16}
    workload = problem.workload
    assert workload.tasks == TASKS
    assert {workload.architecture_of(task) for task in TASKS} == {workload.actor}
    assert workload.actor.name == "qwen3-8b"
    assert (workload.algorithm, workload.mode, workload.optimizer_steps_per_iteration) == ("ppo", "sync", 4)
    sizes = (workload.samples, workload.samples_per_prompt, workload.prompt_tokens, workload.response.maximum)
    assert sizes == (1024, 8, 1024, 1024)


def test_edge_gpus_reach_the_other_region_slowly() -> None:
    topology = scenario("multi-region-hybrid")
    edge, near, far = (topology.device_by_id[name] for name in ("r0/n6/0", "r0/n0/0", "r1/n2/0"))
    assert topology.path(edge, far) == topology.path(far, edge)
    slow, inside, fast = topology.path(edge, far), topology.path(edge, near), topology.path(near, far)
    assert slow is not None and inside is not None and fast is not None
    assert (slow.gbps, inside.gbps, fast.gbps) == (1.0, 100, 5.0)


def test_the_quickstart_sites_are_linked_and_divide_the_engines() -> None:
    files = [TOPOLOGY / "sites" / f"{name}.yaml" for name in ("alpha", "beta", "gamma")]
    topology = topology_of(read_sites(files, TOPOLOGY / "quickstart-links.yaml"))
    engines = {site.name: site.engines for site in topology.sites}
    assert engines == {"alpha": ("megatron",), "beta": ("vllm",), "gamma": ("vllm",)}
    assert Counter((device.site, device.gpu) for device in topology.devices) == {
        ("alpha", "cpu"): 4,
        ("beta", "cpu"): 1,
        ("gamma", "cpu"): 1,
    }
    for one, other in combinations(engines, 2):
        assert topology.link(one, other) is not None


def test_the_example_site_shows_every_key() -> None:
    path = TOPOLOGY / "sites" / "example.yaml"
    example = read_yaml(path, SiteFile)
    assert {*example.model_fields_set, "inventory"} == set(SiteFile.model_fields)
    assert "\n# inventory: " in path.read_text()  # in force it would need the file
    shown = {key for node in example.nodes for key in node.model_fields_set}
    assert shown == set(NodeEntry.model_fields)
    assert len(example.site().nodes) == sum(entry.count for entry in example.nodes)


def test_measured_aws_links_hold_every_pair_once() -> None:
    lines = [line for line in (TOPOLOGY / "aws_links.csv").read_text().splitlines() if not line.startswith("#")]
    rows: list[dict[str, Any]] = list(csv.DictReader(lines))
    pairs = Counter(frozenset((row["region_a"], row["region_b"])) for row in rows)
    regions = frozenset().union(*pairs)
    assert pairs == Counter(frozenset(pair) for pair in combinations(regions, 2))
    assert len(rows) == 45
    assert min(float(row["delay_ms"]) for row in rows) > 0
    assert min(float(row["gbps"]) for row in rows) > 0
