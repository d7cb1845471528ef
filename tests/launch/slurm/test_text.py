"""What Slurm prints, as 22.05 printed it on a real cluster and in the shapes of 23.11 and 24.05."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrl.describe.inventory import (
    Inventory,
    expand_hosts,
    node_groups,
    read_inventory,
    unmapped_gpus,
    write_inventory,
)
from hetrl.errors import HetrlError, UsageError
from launch.remote import script
from launch.slurm.text import at_cluster, of_cluster, parse_discovery, parse_gres, parse_seconds
from tests.launch.remote_cases import part
from tests.locales import in_the_c_locale

RECORDED = Path(__file__).parents[2] / "golden" / "slurm"
WHEN = "2026-11-21T13:17:00+00:00"


def inventory(version: str, site: str = "alps") -> Inventory:
    return parse_discovery((RECORDED / f"{version}.txt").read_text(), site, WHEN)


def inventory_of(node: str) -> Inventory:
    """Return that of a cluster of one node, in the words of scontrol."""
    text = re.sub(r"(?<=@ nodes\n).*?(?=@ end)", f"{node}\n", (RECORDED / "22.05.txt").read_text(), flags=re.DOTALL)
    return parse_discovery(text, "alps", WHEN)


def test_a_real_cluster_of_22_05():
    found = inventory("22.05")
    assert (found.cluster, found.slurm_version, found.max_array_size) == ("site-a", "22.05.8", 1001)
    assert [(p.name, p.default, p.max_seconds, p.default_seconds) for p in found.partitions] == [
        ("gpu", True, 86400, 600),
        ("short", False, 1800, None),
    ]
    busy, idle, drained = found.nodes
    assert (busy.gpus, busy.gpus_used, busy.states) == ({"a100": 4}, {"a100": 2}, ("MIXED",))
    assert (idle.gpus_used, idle.memory_gb, idle.features) == ({}, 67.0, ("a100", "nvlink", "ib"))
    assert not drained.in_service
    assert replace(drained, states=("IDLE", "CLOUD", "POWERED_DOWN")).in_service, "Slurm powers it up for a job"
    assert drained.reason.startswith("bad fan, see ticket=42 [root@")
    assert found.switches == {"leaf1": ("a-n1", "a-n2"), "leaf2": ("a-n3",)}
    (group,) = node_groups(found, {"a100": "a100-80gb"}, ["gpu"])
    assert (group.gpu, group.gpus, group.nodes) == ("a100-80gb", 4, ("a-n1", "a-n2"))


def test_sockets_shards_limits_and_reservations_of_23_11():
    found = inventory("23.11")
    booster, devel = found.partitions
    assert (booster.max_nodes, booster.accounts, booster.up) == (384, None, True)
    assert (devel.accounts, devel.max_seconds, devel.up) == (("rl", "nlp"), 5400, False)
    assert [node.in_service for node in found.nodes] == [True, False, True]
    assert found.nodes[2].gpus == {"A100-SXM4-40GB": 4}
    (reservation,) = found.reservations
    assert (reservation.name, reservation.users, reservation.starts) == ("maint", "root", "2026-12-01T08:00:00")
    assert found.mpi_default == "pmix"


def test_gpus_without_type_are_known_by_a_feature_24_05():
    found = inventory("24.05")
    assert found.federated
    assert found.nodes[1].gpus == {"": 8}
    assert found.nodes[1].gpus_used == {"": 3}
    assert found.nodes[0].reason.startswith("gres/gpu count reported lower than configured (0 < 1)")
    (group,) = node_groups(found, {"h100": "h100-sxm"}, [])
    assert (group.gpu, group.gpus, group.count) == ("h100-sxm", 8, 1)


def test_a_member_of_a_federation_asked_from_another_members_login_node():
    found = inventory("22.05-federation", "beta")
    assert (found.cluster, found.federated) == ("beta", True)
    assert [node.name for node in found.nodes] == ["beta-1", "beta-2"]
    assert not inventory("22.05").federated


def test_everything_is_asked_of_the_cluster_that_is_named(tmp_path):
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "scontrol").chmod(0o755)

    def asked(cluster: str | None) -> list[str]:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", "-c", script("discover", at=of_cluster(cluster))]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        return [line for line in said.splitlines() if line and not line.startswith("@ ") and line != "--version"]

    assert len(asked("beta")) == 6 and all(line.startswith("-M beta ") for line in asked("beta"))
    assert len(asked(None)) == 6 and not any("-M" in line for line in asked(None))
    assert (at_cluster("sinfo", "beta"), at_cluster("sinfo", None)) == ("sinfo -M beta", "sinfo")


@pytest.mark.parametrize(
    ("state", "in_service"),
    [
        *(("IDLE", True), ("MIXED+PLANNED", True), ("IDLE+CLOUD+POWERED_DOWN", True), ("IDLE~", True)),
        *(("IDLE+MAINTENANCE+RESERVED", False), ("IDLE+INVALID_REG", False), ("IDLE*", False), ("IDLE$", False)),
        *(("IDLE+DRAIN", False), ("DOWN*+CLOUD", False)),
    ],
)
def test_nodes_that_take_no_job_are_not_in_service(state, in_service):
    (node,) = inventory_of(f"NodeName=n1 Gres=gpu:a100:4 CPUTot=8 RealMemory=64000 State={state} Partitions=gpu").nodes
    assert node.in_service == in_service


def test_memory_that_is_kept_from_jobs_does_not_count():
    line = "NodeName=n1 Gres=gpu:a100:4 CPUTot=8 RealMemory=64000 State=IDLE Partitions=gpu MemSpecLimit={}"
    assert [inventory_of(line.format(limit)).nodes[0].memory_gb for limit in ("8000", "(null)")] == [58.0, 67.0]


def test_gpus_that_nothing_maps_are_left_out_beside_others():
    found = inventory("22.05")
    first, *others = found.nodes
    old = replace(first, gpus={"gtx1080ti": 4, "a100": 2}, features=())
    mixed = replace(found, nodes=(old, *others))
    groups = node_groups(mixed, {"a100": "a100-80gb"}, ["gpu"])
    assert [(group.gpus, group.memory_gb, group.nodes) for group in groups] == [
        (2, 67.0, ("a-n1",)),
        (4, 67.0, ("a-n2",)),
    ]
    (complaint,) = unmapped_gpus(mixed, {"a100": "a100-80gb"}, ["gpu"])
    assert "gpu:gtx1080ti on a-n1 are is not known" in complaint
    assert unmapped_gpus(found, {"a100": "a100-80gb"}, ["gpu"]) == []


def test_gpus_without_type_of_two_generations_are_told_apart_by_features():
    found = inventory("22.05")
    first, second, *_ = (replace(node, gpus={"": 4}) for node in found.nodes)
    nodes = (replace(first, features=("ib", "v100")), replace(second, features=("a100", "ib")))
    groups = node_groups(replace(found, nodes=nodes), {"v100": "v100-32gb", "a100": "a100-80gb"}, ["gpu"])
    assert [(group.gpu, group.nodes) for group in groups] == [("v100-32gb", ("a-n1",)), ("a100-80gb", ("a-n2",))]


def test_types_on_one_node_share_its_memory_and_cpus():
    found = inventory("22.05")
    first, *_ = found.nodes
    both = replace(found, nodes=(replace(first, gpus={"a100": 2, "l4": 4}, cpus=17),))
    groups = node_groups(both, {"a100": "a100-80gb", "l4": "l4"}, ["gpu"])
    assert [(group.gpu, group.memory_gb, group.cpus) for group in groups] == [("a100-80gb", 33.5, 8), ("l4", 33.5, 8)]


def test_nodes_are_those_of_the_default_partition_where_none_is_named():
    found = inventory("22.05")
    first, *others = found.nodes
    found = replace(found, nodes=(replace(first, partitions=("short",)), *others))
    (group,) = node_groups(found, {"a100": "a100-80gb"}, [])
    assert group.nodes == ("a-n2",), "a job that names no partition never starts on a-n1"
    (group,) = node_groups(found, {"a100": "a100-80gb"}, ["short"])
    assert group.nodes == ("a-n1", "a-n2")
    without = replace(found, partitions=tuple(replace(one, default=False) for one in found.partitions))
    (group,) = node_groups(without, {"a100": "a100-80gb"}, [])
    assert group.nodes == ("a-n1", "a-n2")


def test_gpus_that_nothing_maps_are_asked_for_by_name():
    with pytest.raises(UsageError, match=r"alps: .*gpu:a100 on a-n1 .*gres: \{a100: NAME\}.* a100, ib, nvlink"):
        node_groups(inventory("22.05"), {}, [])


def test_partition_that_is_not_there():
    with pytest.raises(UsageError, match=r'alps: there is no partition "gpus".*gpu'):
        node_groups(inventory("22.05"), {"a100": "a100-80gb"}, ["gpus"])


def test_silent_slurm_is_an_error():
    with pytest.raises(HetrlError, match=r"alps: Slurm said nothing about config, nodes"):
        parse_discovery(
            part("version", "slurm 24.05.0\n") + part("config") + part("partitions", "PartitionName=a\n"), "alps", WHEN
        )


def test_nodes_that_were_cut_off_are_not_read():
    text = (RECORDED / "22.05.txt").read_text()
    with pytest.raises(HetrlError, match=r"alps: Slurm said nothing about nodes"):
        parse_discovery(text[: text.index("@ topology") - 2], "alps", WHEN)


@pytest.mark.parametrize("version", ["22.05", "22.05-federation", "23.11", "24.05"])
def test_the_measured_file_holds_all_of_it(version, tmp_path):
    path = tmp_path / "measured" / "alps.json"
    write_inventory(path, inventory(version))
    assert read_inventory(path) == inventory(version)


def test_the_measured_file_is_utf_8_whatever_the_locale(tmp_path):
    found = replace(inventory("22.05"), cluster="größer")
    document = json.dumps(found.to_json(), ensure_ascii=False)
    (tmp_path / "alps.json").write_text(document, encoding="utf-8")
    with in_the_c_locale():
        assert read_inventory(tmp_path / "alps.json") == found


def test_a_file_that_is_no_inventory(tmp_path):
    (tmp_path / "alps.json").write_text('{"format": "hetrl-inventory/0"}')
    with pytest.raises(UsageError, match=r"alps.json: not an inventory: .*hetrl discover"):
        read_inventory(tmp_path / "alps.json")


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations(days, hours, minutes, seconds):
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    assert parse_seconds(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == total
    assert parse_seconds(f"{days}-{hours:02}") == days * 86400 + hours * 3600
    assert parse_seconds(f"{minutes}:{seconds:02}") == minutes * 60 + seconds
    assert parse_seconds(str(minutes)) == minutes * 60
    assert parse_seconds("UNLIMITED") is None


@given(st.dictionaries(st.from_regex(r"[a-zA-Z][a-zA-Z0-9._-]{0,8}", fullmatch=True), st.integers(1, 16), max_size=4))
def test_gres_lists(gpus):
    entries = [f"gpu:{kind}:{count}(S:0-1)" for kind, count in gpus.items()]
    assert parse_gres(",".join(["shard:8", *entries, "craynetwork:1"])) == gpus


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:8(S:0-1)", {"": 8}),
        ("gpu:1g.10gb:7", {"1g.10gb": 7}),
        ("gpu:1g.10gb+me,gpu:nvidia_a100_3g.20gb:2(IDX:0,7)", {"1g.10gb+me": 1, "nvidia_a100_3g.20gb": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("", {}),
    ],
)
def test_gres_in_other_shapes(text, gpus):
    assert parse_gres(text) == gpus


@given(st.integers(1, 3), st.integers(0, 98), st.integers(0, 5))
def test_host_lists(width, first, more):
    last = first + more
    names = tuple(f"n{str(number).zfill(width)}-x" for number in range(first, last + 1))
    assert expand_hosts(f"a,n[{str(first).zfill(width)}-{last}]-x,b[1,3]") == ("a", *names, "b1", "b3")
