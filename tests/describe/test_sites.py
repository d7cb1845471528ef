"""Site, link and scenario files, and the topology that follows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetrl.describe.inventory import ClusterNode, Inventory, Partition, write_inventory
from hetrl.describe.sites import ScenarioFile, SiteFile, read_scenario, read_sites, topology_of
from hetrl.describe.yaml_file import read_mapping
from hetrl.errors import UsageError
from hetrl.hardware import Device, Link, Node, Path as Between, Site, Topology
from hetrl.problem import Problem
from hetrl.search import solve
from tests.search.search_cases import job

ALPS: dict[str, Any] = {
    "name": "alps",
    "nodes": [{"name": "a100", "gpu": "a100-40gb", "gpus": 4, "count": 2, "nic_gbps": 200, "peer_gbps": 2000}],
}
JSC: dict[str, Any] = {
    "name": "jsc",
    "engines": ["vllm"],
    "delay_ms": 0.1,
    "nodes": [{"name": "l40s", "gpu": "l40s", "gpus": 2, "wan_gbps": 0.5}, {"name": "l4", "gpu": "l4", "gpus": 1}],
}
LINK: dict[str, Any] = {"between": ["alps", "jsc"], "delay_ms": 12.5, "gbps": 5}


def write(path: Path, document: object) -> Path:
    path.write_text(yaml.safe_dump(document))
    return path


def scenario(*sites: dict[str, Any], links: tuple[dict[str, Any], ...] = ()) -> ScenarioFile:
    return ScenarioFile.model_validate({"sites": list(sites), "links": list(links)})


def both() -> Topology:
    return topology_of(scenario(ALPS, JSC, links=(LINK,)))


def test_site_and_link_files_make_a_topology(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{site['name']}.yaml", site) for site in (ALPS, JSC)]
    links = write(tmp_path / "links.yaml", {"links": [LINK]})
    topology = topology_of(read_sites(files, links))
    assert topology == both()
    assert topology.links == (Link(("alps", "jsc"), 12.5, 5.0),)
    assert topology_of(read_sites(files, None)).links == ()


def test_a_scenario_file_holds_sites_and_links(tmp_path: Path) -> None:
    path = write(tmp_path / "scenario.yaml", {"sites": [ALPS, JSC], "links": [LINK]})
    assert topology_of(read_scenario(path)) == both()


def test_equal_nodes_are_numbered_and_a_single_one_is_not() -> None:
    assert [node.name for site in both().sites for node in site.nodes] == ["a100-0", "a100-1", "l40s", "l4"]
    assert [device.id for device in both().devices][-4:] == ["alps/a100-1/3", "jsc/l40s/0", "jsc/l40s/1", "jsc/l4/0"]


def test_classes_are_site_type_and_node_size() -> None:
    found = {key.name: len(devices) for key, devices in both().devices_by_kind.items()}
    assert found == {"alps:a100-40gbx4": 8, "jsc:l40sx2": 2, "jsc:l4x1": 1}


@pytest.mark.parametrize(
    ("first", "second", "delay_ms", "gbps"),
    [
        ("alps/a100-0/0", "alps/a100-0/1", 0.005, 2000.0),  # the node's own wiring
        ("jsc/l40s/0", "jsc/l40s/1", 0.005, 256.0),  # the catalogue's: PCIe 4.0, one direction
        ("alps/a100-0/0", "alps/a100-1/0", 0.05, 200.0),  # the slower network interface
        ("alps/a100-0/0", "jsc/l4/0", 12.5, 5.0),  # the link
        ("alps/a100-0/0", "jsc/l40s/0", 12.5, 0.5),  # the node's uplink
    ],
)
def test_paths(first: str, second: str, delay_ms: float, gbps: float) -> None:
    devices = both().device_by_id
    assert both().path(devices[first], devices[second]) == Between(delay_ms, gbps)
    assert both().path(devices[second], devices[first]) == Between(delay_ms, gbps)


def test_no_link_is_no_path() -> None:
    sites = both().sites
    ends = Device("alps", "a100-0", 0, "a100-40gb"), Device("jsc", "l4", 0, "l4")
    assert Topology(sites).path(*ends) is None
    assert Topology(sites, (Link(("jsc", "alps"), 1, 0),)).path(*ends) is None


def test_a_transfer_takes_delay_plus_bytes_over_bandwidth() -> None:
    assert Between(delay_ms=25, gbps=1).seconds(1e9) == pytest.approx(8.025)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({**ALPS, "nodes": []}, "site alps: no nodes are listed"),
        ({**ALPS, "engines": ["vlm"]}, 'site alps: unknown engine "vlm"'),
        ({**ALPS, "nodes": [{**ALPS["nodes"][0], "name": "a/100"}]}, 'the name "a/100-0" in site "alps"'),
        ({**ALPS, "nodes": ALPS["nodes"] * 2}, 'node of site alps "a100-0" is there twice'),
        ({**ALPS, "nodes": [{"name": "n", "gpu": "a100-40", "gpus": 1}]}, 'did you mean "a100-40gb"'),
    ],
)
def test_a_site_that_cannot_be(site: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        topology_of(scenario(site))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (({**LINK, "between": ["alps", "jcs"]},), 'there is no site "jcs"; did you mean "jsc"'),
        (({**LINK, "between": ["alps", "alps"]},), "a link joins two sites"),
    ],
)
def test_a_link_that_cannot_be(links: tuple[dict[str, Any], ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        topology_of(scenario(ALPS, JSC, links=links))


@pytest.mark.parametrize("other", [LINK, {**LINK, "between": ["jsc", "alps"], "gbps": 100}])
def test_a_link_that_is_there_twice(tmp_path: Path, other: dict[str, Any]) -> None:
    gbps = f"with 5 and {other['gbps']:g} gbps"
    message = f"links: the link between alps and jsc is there twice, {gbps}"
    with pytest.raises(UsageError, match=message):
        read_scenario(write(tmp_path / "scenario.yaml", {"sites": [ALPS, JSC], "links": [LINK, other]}))
    with pytest.raises(UsageError, match=message):
        read_sites([], write(tmp_path / "links.yaml", {"links": [LINK, other]}))
    with pytest.raises(UsageError, match='link "alps-jsc" is there twice'):
        Topology(both().sites, (*both().links, Link(("jsc", "alps"), 1.0, 1.0)))


@pytest.mark.parametrize("number", [math.inf, math.nan, -1.0])
def test_numbers_that_no_measurement_gives(tmp_path: Path, number: float) -> None:
    for key in ("gbps", "delay_ms"):
        link = {**LINK, key: number}
        with pytest.raises(UsageError, match=f"links.0.{key}: Input should be"):
            read_scenario(write(tmp_path / "scenario.yaml", {"sites": [ALPS, JSC], "links": [link]}))
        with pytest.raises(UsageError, match=f"link between alps and jsc: {key} must be 0 or more, and finite"):
            Topology(both().sites, (replace(both().links[0], **{key: number}),))
    for key in ("nic_gbps", "host_memory_gb", "wan_gbps", "peer_gbps", "price_per_gpu_hour"):
        with pytest.raises(UsageError, match=f"site s, node n: {key} must be .*, and finite"):
            Topology((Site("s", (Node("n", "l4", 1, **{key: number}),)),))
    for key in ("delay_ms", "node_delay_ms", "queue_hours", "budget_gpu_hours"):
        with pytest.raises(UsageError, match=f"site s: {key} must be .*, and finite"):
            Topology((Site("s", (Node("n", "l4", 1),), **{key: number}),))


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text("links:\n- between: [alps, jsc]\n  delay_ms: 1\n  gbps: 1\n  gbps: 100\n")
    with pytest.raises(UsageError, match=r'links.yaml: the key "gbps" is there twice, in lines 4 and 5'):
        read_sites([], path)
    path.write_text("anchor: &one {a: 1, b: 2}\nmerged: {<<: *one, b: 3}\n")
    assert read_mapping(path)["merged"] == {"a": 1, "b": 3}
    path.write_text("? [1, 2]\n: 3\n")
    with pytest.raises(UsageError, match="not YAML: .*unhashable key"):
        read_mapping(path)


DECODER = {
    "peak_tflops": 200,
    "memory_gb": 96,
    "memory_gb_per_s": 6000,
    "peer_gbps": 512,
    "host_gbps": 256,
    "like": "h100",
}
FAST: dict[str, Any] = {
    "name": "fast",
    "engines": ["vllm"],
    "gpus": {"decoder": DECODER},
    "nodes": [{"name": "d", "gpu": "decoder", "gpus": 4}],
}


def test_a_type_that_a_site_describes_is_planned_with() -> None:
    trainers = {**ALPS, "engines": ["megatron"]}
    topology = topology_of(scenario(FAST, trainers, links=({**LINK, "between": ["alps", "fast"]},)))
    (described,) = topology.described
    assert (described.name, described.memory_gb, described.like) == ("decoder", 96, "h100")
    one, other, *_ = topology.devices
    assert topology.path(one, other) == Between(0.005, 512)
    efficiencies = Problem(topology, job()).efficiencies
    rates, like = efficiencies.rates("decoder"), efficiencies.rates("h100")
    assert rates.usable_gb == 96 * 0.92
    assert rates.decode_bytes / 6000 == pytest.approx(like.decode_bytes / 3350)
    assert rates.training_flops / 200 == pytest.approx(like.training_flops / 989.4)
    assert efficiencies.uncalibrated(["decoder"]) == {"decoder": ("decode", "prefill", "training")}
    plan = solve(Problem(topology, job()), "sha-ea", 60.0, 0, evaluations=3000)
    assert plan.site_order == ("alps", "fast")
    assert {device.split("/")[0] for device in plan.tasks["actor_generation"].devices} == {"fast"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("h100", {}, 'GPU type "h100": the name is one of the catalogue'),
        ("cpu-x", {}, 'GPU type "cpu-x": the name is one of the catalogue'),
        ("decoder", {"like": "h10"}, r'"decoder": like: unknown GPU type "h10"'),
    ],
)
def test_a_description_that_cannot_be(name: str, changes: dict[str, Any], message: str) -> None:
    site = {**FAST, "gpus": {name: {**DECODER, **changes}}, "nodes": [{"name": "d", "gpu": name, "gpus": 4}]}
    with pytest.raises(UsageError, match=message):
        topology_of(scenario(site))


def test_a_type_that_nothing_describes() -> None:
    with pytest.raises(UsageError, match='unknown GPU type "decoder"'):
        topology_of(scenario({**FAST, "gpus": {}}))


def test_two_sites_that_describe_a_type_differently() -> None:
    other = {**FAST, "name": "other", "gpus": {"decoder": {**DECODER, "memory_gb": 48}}}
    with pytest.raises(UsageError, match='GPU type "decoder" is there twice'):
        topology_of(scenario(FAST, other))
    same = {**FAST, "name": "other"}
    assert len(topology_of(scenario(FAST, same)).described) == 1


def test_two_sites_of_one_name() -> None:
    with pytest.raises(UsageError, match='site "alps" is there twice'):
        topology_of(scenario(ALPS, ALPS))


def test_prices_are_of_every_gpu_or_by_type_and_queues_go_to_the_planner() -> None:
    both = [{"name": "a", "gpu": "a100-40gb", "gpus": 4}, {"name": "l", "gpu": "l4", "gpus": 1}]
    entry = {"name": "x", "nodes": both, "queue_hours": 1.5}

    def prices(price: object) -> list[float]:
        nodes = SiteFile.model_validate({**entry, "price_per_gpu_hour": price}).site().nodes
        return [node.price_per_gpu_hour for node in nodes]

    assert SiteFile.model_validate(entry).site().queue_hours == 1.5
    assert prices(2) == [2, 2]
    assert prices({"a100-40gb": 1.8, "l4": 0}) == [1.8, 0]
    with pytest.raises(UsageError, match="site x: price_per_gpu_hour: no price of l4; add it"):
        prices({"a100-40gb": 1.8})
    with pytest.raises(UsageError, match='price_per_gpu_hour: unknown GPU type "a100-40"; did you mean "a100-40gb"'):
        prices({"a100-40": 1.8, "l4": 0.5})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"egres": "direct"}, 'unknown key "egres"; did you mean "egress"?'),
        ({"gateway_port": 70000}, "gateway_port: "),
        ({"name": "al/ps"}, "name: "),
        ({"name": ".."}, "name: "),
        ({"name": "the alps"}, "name: "),
        ({"allocation": "rack"}, "allocation: "),
        ({"cluster": "all"}, 'cluster: "all" is not the name of one cluster'),
        ({"cluster": "alps,jsc"}, 'cluster: "alps,jsc" is not the name of one cluster'),
        ({"nodes": [{"name": "n", "gpu": "l4", "gpu_s": 1}]}, 'unknown key "nodes.0.gpu_s"; did you mean "gpus"?'),
        ({"nodes": [{"name": "n", "gpu": "l4", "gpus": 0}]}, "nodes.0.gpus: "),
        ({"nodes": [{"name": "n", "gpu": "l4", "gpus": 10**12}]}, "nodes.0: 1 nodes of 1,000,000,000,000 GPUs; "),
        ({"nodes": [{"name": "n", "gpu": "l4", "gpus": 8, "count": 10**6}]}, "nodes.0: 1,000,000 nodes of 8 GPUs; "),
    ],
)
def test_a_site_file_that_is_wrong_names_file_and_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "alps.yaml", {**ALPS, **change})
    with pytest.raises(UsageError) as caught:
        read_sites([path], None)
    assert f"{path}: " in str(caught.value) and message in str(caught.value)


def test_a_node_outside_the_files_has_the_same_defaults() -> None:
    entry = SiteFile.model_validate({"name": "x", "nodes": [{"name": "n", "gpu": "l4", "gpus": 1}]})
    assert entry.site() == Site("x", (Node("n", "l4", 1),))


def measured(site: str, *nodes: tuple[str, dict[str, int], float]) -> Inventory:
    """Return an inventory whose nodes have a state, GPUs by GRES type and a memory."""
    found = [
        ClusterNode(f"n{number}", gpus, {}, 64, memory_gb, (), ("gpu",), (state,))
        for number, (state, gpus, memory_gb) in enumerate(nodes)
    ]
    partition = Partition("gpu", True, True, None, None, 1, None, None)
    return Inventory(site, site, "22.05", "2026-01-01T00:00:00+00:00", 1001, "none", False, (partition,), tuple(found))


def test_measured_nodes_win_over_written_ones(tmp_path: Path) -> None:
    idle = ("IDLE", {"a100": 4}, 500.0)
    inventory = measured("alps", idle, ("DOWN", {"a100": 4}, 500.0), idle, ("IDLE", {"a100": 8}, 0.0))
    write_inventory(tmp_path / "alps.json", inventory)
    written = {**ALPS, "gres": {"a100": "a100-40gb"}, "inventory": str(tmp_path / "alps.json")}
    (site,) = topology_of(read_sites([write(tmp_path / "alps.yaml", written)], None)).sites
    assert [(node.name, node.gpus, node.host_memory_gb) for node in site.nodes] == [
        ("a100-0", 4, 496.0),  # the gateway's share stays free
        ("a100-1", 4, 496.0),
        ("a100.2", 8, 512.0),  # Slurm counts no memory there
    ]
    assert {(node.nic_gbps, node.peer_gbps) for node in site.nodes} == {(200, 2000)}  # as written: Slurm knows neither


def test_measured_nodes_of_one_gpu_keep_the_type_that_slurm_gives_each(tmp_path: Path) -> None:
    write_inventory(tmp_path / "alps.json", measured("alps", ("IDLE", {"sxm": 4}, 99.0), ("IDLE", {"pcie": 4}, 99.0)))
    gres = {"sxm": "a100-40gb", "pcie": "a100-40gb"}
    written = {**ALPS, "gres": gres, "inventory": str(tmp_path / "alps.json")}
    (site,) = read_sites([write(tmp_path / "alps.yaml", written)], None).sites
    assert [(node.name, node.gres) for node in site.nodes] == [("a100", "sxm"), ("a100.2", "pcie")]


def test_a_scenario_takes_the_inventories_of_its_sites(tmp_path: Path) -> None:
    write_inventory(tmp_path / "alps.json", measured("alps", ("IDLE", {"a100": 2}, 99.0)))
    written = {**ALPS, "gres": {"a100": "a100-40gb"}, "inventory": str(tmp_path / "alps.json")}
    (site,) = topology_of(read_scenario(write(tmp_path / "both.yaml", {"sites": [written]}))).sites
    assert [node.gpus for node in site.nodes] == [2]


def test_a_gres_that_stands_for_no_known_gpu_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "alps.yaml", {**ALPS, "gres": {"a100": "a100-40g"}})
    with pytest.raises(UsageError, match='site alps: gres a100: unknown GPU type "a100-40g"; did you mean "a100-40gb"'):
        read_sites([file], None)


def test_an_inventory_that_is_not_there_or_of_another_site_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    file = write(tmp_path / "alps.yaml", {**ALPS, "inventory": str(path)})
    with pytest.raises(UsageError, match=r"site alps: inventory: there is no .*; run `hetrl discover`"):
        read_sites([file], None)
    write_inventory(path, measured("jsc"))
    with pytest.raises(UsageError, match=r"is of site jsc"):
        read_sites([file], None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("account", "rl\nrm -rf ~"),
        ("partitions", ["gpu\n"]),
        ("modules", ["cuda\r"]),
        ("gres", {"gpu:a100\n": "a100-40gb"}),
        ("nodes", [{"name": "a\x1b[2J", "gpu": "a100-40gb", "gpus": 1}]),
        ("sbatch", ["--comment=a\x85b"]),
    ],
)
def test_a_line_break_is_refused_wherever_a_site_file_goes_into_a_script(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key}: .* has a line break or another control character"):
        SiteFile.model_validate({**ALPS, key: value})
