"""The GPU catalogue, what a topology refuses, and the paths between devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetrl.cost.efficiency import calibrated
from hetrl.errors import UsageError
from hetrl.gpus import PHASES, gpu_catalogue, gpu_type
from hetrl.hardware import Link, Node, NodeKind, Path, Site, Topology

PUBLISHED_GPUS = {
    # name: TFLOPS, GB, GB/s, peer and host in gbps of one direction
    "a100-40gb": (312, 40, 1555, 2400, 256),
    "a100-80gb": (312, 80, 2039, 2400, 256),
    "a100-hetrl": (312, 40, 2039, 2400, 256),
    "h100": (989.4, 80, 3350, 3600, 512),
    "h200": (989.4, 141, 4800, 3600, 512),
    "gh200": (989.4, 96, 4000, 3600, 3600),
    "h20": (148, 96, 4000, 3600, 512),
    "b200": (2250, 180, 8000, 7200, 512),
    "gb200": (2500, 186, 8000, 7200, 1800),
    "mi300x": (1307.4, 192, 5300, 3584, 512),
    "l40s": (362.05, 48, 864, 256, 256),
    "l40": (181.05, 48, 864, 256, 256),
    "l4": (121, 24, 300, 256, 256),
    "a10g": (70, 24, 600, 256, 256),
    "a40": (149.7, 48, 696, 256, 256),
    "v100": (125, 32, 900, 1200, 128),
    "rtx-4090": (165.2, 24, 1008, 256, 256),
}
# What the vendors print: both directions added, in GB/s.
BOTH_DIRECTIONS_GB_PER_S = {
    "NVLink 2": 300,
    "NVLink 3": 600,
    "NVLink 4": 900,
    "NVLink 5": 1800,
    "Infinity Fabric": 896,
    "PCIe 4.0 x16": 64,
}


@pytest.mark.parametrize("name", PUBLISHED_GPUS)
def test_catalogue_has_the_published_figures(name: str) -> None:
    gpu = gpu_type(name)
    figures = (gpu.peak_tflops, gpu.memory_gb, gpu.memory_gb_per_s, gpu.peer_gbps, gpu.host_gbps)
    assert figures == PUBLISHED_GPUS[name]


def test_catalogue_has_nothing_else_but_cpu_and_slices() -> None:
    whole = {name for name, gpu in gpu_catalogue().items() if not gpu.slice_of}
    assert whole == {*PUBLISHED_GPUS, "cpu", "cpu-half"}


@pytest.mark.parametrize(
    ("name", "tflops", "gb", "gb_per_s", "gbps"),
    [
        ("a100-40gb-1g.5gb", 312 * 14 / 108, 5, 1555 / 8, 32),
        ("a100-40gb-3g.20gb", 312 * 42 / 108, 20, 1555 / 2, 128),
        ("a100-80gb-7g.80gb", 312 * 98 / 108, 80, 2039, 256),
        ("h100-1g.20gb", 989.4 * 26 / 132, 20, 3350 / 4, 128),
        ("h200-3g.71gb", 989.4 * 60 / 132, 70.5, 2400, 256),
        ("gh200-4g.48gb", 989.4 * 64 / 132, 48, 2000, 1800),
    ],
)
def test_a_slice_has_its_share_of_the_gpu(name: str, tflops: float, gb: float, gb_per_s: float, gbps: float) -> None:
    gpu = gpu_type(name)
    assert (gpu.memory_gb, gpu.memory_gb_per_s, gpu.host_gbps) == (gb, gb_per_s, gbps)
    assert gpu.peak_tflops == pytest.approx(tflops)
    assert gpu.peer_gbps == gpu.host_gbps  # through host memory, the same for all
    assert gpu.slice_of == gpu.like == name.rsplit("-", 1)[0]
    assert calibrated().uncalibrated([name]) == {name: PHASES}


def test_the_name_of_a_slice_says_its_memory_and_about_its_computing() -> None:
    slices = [gpu for gpu in gpu_catalogue().values() if gpu.slice_of]
    assert {gpu.slice_of for gpu in slices} == {"a100-40gb", "a100-80gb", "h100", "h200", "gh200"}
    for gpu in slices:
        computes, gigabytes = gpu.name.removeprefix(f"{gpu.slice_of}-").removesuffix("gb").split("g.")
        assert gpu.memory_gb == pytest.approx(float(gigabytes), abs=0.5), gpu.name
        assert 0.8 <= gpu.peak_tflops / gpu_type(gpu.slice_of).peak_tflops * 7 / float(computes) <= 1.4, gpu.name


def test_the_slices_of_a_gpu_are_listed_where_one_of_them_is_meant() -> None:
    with pytest.raises(UsageError, match=r'did you mean "h100-1g.10gb"\?; known:.* h100-3g.40gb') as caught:
        gpu_type("h100-1g.10")
    assert "a100-40gb-3g.20gb" not in str(caught.value)


@pytest.mark.parametrize("name", PUBLISHED_GPUS)
def test_peer_bandwidth_is_half_of_what_its_interconnect_is_sold_as(name: str) -> None:
    gpu = gpu_type(name)
    sold = next(rate for kind, rate in BOTH_DIRECTIONS_GB_PER_S.items() if gpu.interconnect.startswith(kind))
    assert f"{sold} GB/s both directions" in gpu.interconnect
    assert gpu.peer_gbps == sold / 2 * 8


def test_catalogue_entries_are_plausible() -> None:
    for gpu in gpu_catalogue().values():
        numbers = (gpu.peak_tflops, gpu.memory_gb, gpu.memory_gb_per_s, gpu.peer_gbps, gpu.host_gbps)
        assert min(numbers) > 0, gpu.name
        assert 0.5 <= gpu.usable_memory < 1, gpu.name
        assert gpu.source, gpu.name
        assert gpu.memory_gb_per_s * 8 >= gpu.host_gbps, gpu.name


def test_the_machine_entry_is_slower_than_every_gpu() -> None:
    cpu = gpu_type("cpu")
    for name in PUBLISHED_GPUS:
        gpu = gpu_type(name)
        assert cpu.peak_tflops < gpu.peak_tflops / 100
        assert cpu.memory_gb_per_s < gpu.memory_gb_per_s
        assert cpu.peer_gbps < gpu.peer_gbps


def test_an_unknown_gpu_meets_its_neighbour() -> None:
    with pytest.raises(UsageError, match='unknown GPU type "l40ss"; did you mean "l40s"'):
        gpu_type("l40ss")


ALPS = Site(
    "alps",
    (
        Node("a0", "a100-80gb", 4, nic_gbps=200),
        Node("a1", "a100-80gb", 4, nic_gbps=100),
        Node("small", "a100-80gb", 2, nic_gbps=100, peer_gbps=256),
    ),
    delay_ms=0.02,
    node_delay_ms=0.004,
)
JSC = Site("jsc", (Node("s0", "l40s", 8, nic_gbps=100), Node("edge", "l4", 1, nic_gbps=25, wan_gbps=1.0)))
BSC = Site("bsc", (Node("v0", "v100", 4, nic_gbps=2.5),))
LONE = Site("lone", (Node("v0", "v100", 4),))
THREE = Topology(
    (ALPS, JSC, BSC, LONE),
    (Link(("alps", "jsc"), 8.0, 5.0), Link(("jsc", "bsc"), 12.0, 10.0), Link(("lone", "bsc"), 1.0, 0.0)),
)


def test_without_slices_a_site_of_nothing_else_is_gone_with_its_links() -> None:
    mixed = replace(JSC, nodes=(*JSC.nodes, Node("mig", "h100-1g.10gb", 7)))
    sliced = Site("bsc", (Node("mig", "a100-40gb-3g.20gb", 2),))
    whole = Topology((ALPS, mixed, sliced), THREE.links[:2]).whole_gpus
    assert whole == Topology((ALPS, JSC), THREE.links[:1])


def path(one: str, other: str) -> Path | None:
    return THREE.path(THREE.device_by_id[one], THREE.device_by_id[other])


def test_devices_are_named_in_order() -> None:
    assert len(THREE.devices) == 4 + 4 + 2 + 8 + 1 + 4 + 4
    assert [device.id for device in THREE.devices[3:5]] == ["alps/a0/3", "alps/a1/0"]
    assert THREE.device_by_id["jsc/edge/0"].gpu == "l4"


def test_classes_are_site_type_and_node_size() -> None:
    sizes = {key: len(devices) for key, devices in THREE.devices_by_kind.items()}
    assert sizes == {
        NodeKind("alps", "a100-80gb", 4): 8,
        NodeKind("alps", "a100-80gb", 2): 2,
        NodeKind("jsc", "l40s", 8): 8,
        NodeKind("jsc", "l4", 1): 1,
        NodeKind("bsc", "v100", 4): 4,
        NodeKind("lone", "v100", 4): 4,
    }
    assert next(iter(THREE.devices_by_kind)).name == "alps:a100-80gbx4"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param("alps/a0/0", "alps/a0/1", Path(0.004, 2400), id="inside-a-node"),
        pytest.param("alps/small/0", "alps/small/1", Path(0.004, 256), id="a-node-with-its-own-wiring"),
        pytest.param("jsc/s0/0", "jsc/s0/7", Path(0.005, 256), id="over-pcie"),
        pytest.param("alps/a0/0", "alps/a1/0", Path(0.02, 100), id="inside-a-site-the-slower-adapter"),
        pytest.param("alps/a0/0", "jsc/s0/0", Path(8.0, 5.0), id="over-a-link"),
        pytest.param("alps/a0/0", "jsc/edge/0", Path(8.0, 1.0), id="a-node-with-a-slow-uplink"),
        pytest.param("jsc/s0/0", "jsc/edge/0", Path(0.05, 25), id="a-slow-uplink-slows-nothing-inside"),
        pytest.param("jsc/s0/0", "bsc/v0/0", Path(12.0, 2.5), id="an-adapter-slower-than-the-link"),
        pytest.param("alps/a0/0", "bsc/v0/0", None, id="no-link"),
        pytest.param("bsc/v0/0", "lone/v0/0", None, id="a-link-without-bandwidth"),
    ],
)
def test_paths_are_the_same_both_ways(one: str, other: str, expected: Path | None) -> None:
    assert path(one, other) == expected
    assert path(other, one) == expected


def test_links_have_no_direction() -> None:
    assert THREE.link("jsc", "alps") == THREE.link("alps", "jsc") == Link(("alps", "jsc"), 8.0, 5.0)
    assert THREE.link("alps", "bsc") is None


def test_a_gigabyte_over_eight_gbps_takes_a_second_and_the_delay() -> None:
    assert Path(delay_ms=25.0, gbps=8.0).seconds(1e9) == pytest.approx(1.025)
    assert Path(delay_ms=25.0, gbps=8.0).seconds(0) == pytest.approx(0.025)


def test_seconds_between_gpus_of_one_node() -> None:
    # NVLink 3 moves 300 GB/s one way, PCIe 4.0 x16 32 GB/s.
    nvlink, pcie = path("alps/a0/0", "alps/a0/1"), path("jsc/s0/0", "jsc/s0/1")
    assert nvlink is not None and pcie is not None
    assert nvlink.seconds(300e9) == pytest.approx(1.000004)
    assert pcie.seconds(32e9) == pytest.approx(1.000005)


def with_node(**changes: Any) -> Topology:
    return Topology((replace(ALPS, nodes=(replace(ALPS.nodes[0], **changes),)),))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        pytest.param(lambda: Topology((ALPS, ALPS)), ["site", '"alps"', "twice"], id="site-twice"),
        pytest.param(
            lambda: Topology((replace(ALPS, nodes=(ALPS.nodes[0],) * 2),)), ["alps", '"a0"', "twice"], id="node-twice"
        ),
        pytest.param(
            lambda: Topology((ALPS, JSC), (Link(("alps", "jsc"), 1, 1), Link(("jsc", "alps"), 2, 2))),
            ["link", "alps-jsc", "twice"],
            id="link-twice-the-other-way-round",
        ),
        pytest.param(lambda: Topology((replace(ALPS, name="a/b"),)), ['"a/b"', '"/"'], id="slash-in-site"),
        pytest.param(lambda: Topology((replace(ALPS, name=""),)), ["non-empty"], id="empty-site"),
        pytest.param(lambda: with_node(name="x/y"), ["alps", '"x/y"'], id="slash-in-node"),
        pytest.param(lambda: with_node(name=" a0"), ["alps", '" a0"'], id="space-in-node"),
        pytest.param(lambda: with_node(gpu="a100"), ["alps", "a0", '"a100"', "did you mean", "h200"], id="unknown-gpu"),
        pytest.param(lambda: with_node(gpus=0), ["alps", "a0", "0 GPUs"], id="no-gpus"),
        pytest.param(lambda: with_node(nic_gbps=0), ["alps", "a0", "nic_gbps"], id="no-adapter"),
        pytest.param(lambda: with_node(host_memory_gb=-1), ["alps", "a0", "host_memory_gb"], id="no-memory"),
        pytest.param(lambda: with_node(wan_gbps=0), ["alps", "a0", "wan_gbps"], id="no-uplink"),
        pytest.param(lambda: with_node(peer_gbps=0), ["alps", "a0", "peer_gbps"], id="no-wiring"),
        pytest.param(
            lambda: Topology((replace(ALPS, engines=("vlm",)),)), ["alps", '"vlm"', "megatron", "vllm"], id="engine"
        ),
        pytest.param(
            lambda: Topology((replace(ALPS, allocation="rack"),)), ["alps", "allocation", '"rack"'], id="allocation"
        ),
        pytest.param(lambda: Topology((replace(ALPS, delay_ms=-1),)), ["alps", "delay_ms"], id="site-delay"),
        pytest.param(
            lambda: Topology((ALPS, JSC), (Link(("alps", "jcs"), 1, 1),)),
            ["alps and jcs", 'no site "jcs"', 'did you mean "jsc"'],
            id="link-to-nowhere",
        ),
        pytest.param(
            lambda: Topology((ALPS, JSC), (Link(("jsc", "jsc"), 1, 1),)),
            ["jsc and jsc", "two sites"],
            id="link-to-self",
        ),
        pytest.param(
            lambda: Topology((ALPS, JSC), (Link(("alps", "jsc"), -1, 1),)), ["alps and jsc", "delay_ms"], id="delay"
        ),
        pytest.param(
            lambda: Topology((ALPS, JSC), (Link(("alps", "jsc"), 1, -1),)), ["alps and jsc", "gbps"], id="bandwidth"
        ),
    ],
)
def test_a_topology_that_cannot_be_is_refused(build: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as refusal:
        build()
    assert [word for word in words if word not in str(refusal.value)] == []
