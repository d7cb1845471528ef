"""Slices of GPUs (MIG) that Slurm has: what they may be mapped to, and what is said where that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetrl.describe.inventory import node_groups, write_inventory
from hetrl.describe.sites import SiteFile, read_sites, topology_of
from hetrl.describe.slices import profile_of, slices_of
from hetrl.errors import UsageError
from hetrl.gpus import gpu_catalogue
from tests.describe.test_sites import DECODER, measured

A30 = {**DECODER, "memory_gb": 12, "slice_of": "a30"}


@pytest.mark.parametrize(
    ("gres", "profile", "slices"),
    [
        ("3g.20gb", "3g.20gb", ["a100-40gb-3g.20gb"]),
        ("a100_3g.20gb", "3g.20gb", ["a100-40gb-3g.20gb"]),
        ("mig-3g-20gb", "3g.20gb", ["a100-40gb-3g.20gb"]),
        ("NVIDIA_A100_3g.40gb", "3g.40gb", ["a100-80gb-3g.40gb"]),
        ("1g.10gb+me", "1g.10gb", ["a100-40gb-1g.10gb", "a100-80gb-1g.10gb", "h100-1g.10gb"]),
        ("a100_1g.10gb", "1g.10gb", ["a100-40gb-1g.10gb", "a100-80gb-1g.10gb"]),
        ("nvidia_a100_80gb_pcie_1g.10gb", "1g.10gb", ["a100-80gb-1g.10gb"]),
        ("h100_1g.10gb", "1g.10gb", ["h100-1g.10gb"]),
        ("h100_nvl_1g.12gb", "1g.12gb", []),  # the GH200's are not meant
        ("a30_2g.12gb", "2g.12gb", []),
        ("a10g_24gb", None, []),
        ("a100", None, []),
        ("", None, []),
    ],
)
def test_a_gres_type_tells_which_slices_it_may_be(gres: str, profile: str | None, slices: list[str]) -> None:
    assert profile_of(gres) == profile
    assert slices_of(gres) == slices


def test_every_slice_of_the_catalogue_is_known_by_its_own_name() -> None:
    for gpu in gpu_catalogue().values():
        if gpu.slice_of:
            assert slices_of(gpu.name) == [gpu.name]


def site(gres: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"name": "alps", "gres": gres, "nodes": [{"name": "n", "gpu": next(iter(gres.values())), "gpus": 2}], **more}


def written(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("gres", "gpu", "message"),
    [
        ("3g.20gb", "a100-40gb", r"is a slice of a GPU .*a100-40gb a whole one.*\{3g.20gb: a100-40gb-3g.20gb\}"),
        ("7g.80gb", "a100-80gb", r"is a slice .*\{7g.80gb: a100-80gb-7g.80gb\}` or h100-7g.80gb"),
        ("1g.10gb+me", "h100", r"is a slice .*`gres: \{1g.10gb\+me: .*h100-1g.10gb"),
        (
            "a100_3g.20gb",
            "a100-40gb-1g.5gb",
            r"is not a100-40gb-1g.5gb; write `gres: \{a100_3g.20gb: a100-40gb-3g.20gb",
        ),
        ("h100_1g.10gb", "a100-80gb-1g.10gb", r"is not a100-80gb-1g.10gb; write `gres: \{h100_1g.10gb: h100-1g.10gb"),
        ("a30_2g.12gb", "l4", r"is a slice .*the catalogue has no such slice: describe it under `gpus`"),
    ],
)
def test_a_slice_is_mapped_to_nothing_else(tmp_path: Path, gres: str, gpu: str, message: str) -> None:
    file = written(tmp_path / "alps.yaml", site({gres: gpu}))
    with pytest.raises(UsageError, match=message) as caught:
        read_sites([file], None)
    assert str(caught.value).startswith(f"{file}: gres: {gres} is ")


def test_a_described_slice_says_so_and_has_its_memory(tmp_path: Path) -> None:
    file = tmp_path / "alps.yaml"
    for description, message in (
        ({**A30, "slice_of": ""}, "a30_2g.12gb is a slice of a GPU .*, part a whole one"),
        ({**A30, "memory_gb": 24}, "is a slice of 12 GB, part has 24 GB"),
    ):
        with pytest.raises(UsageError, match=message):
            read_sites([written(file, site({"a30_2g.12gb": "part"}, gpus={"part": description}))], None)
    right = written(file, site({"a30_2g.12gb": "part"}, gpus={"part": A30}))
    topology = topology_of(read_sites([right], None))
    assert {topology.slice_of(device) for device in topology.devices} == {"a30"}
    assert topology.whole_gpus.sites == ()


def test_measured_slices_are_planned_with_under_their_own_gres_type(tmp_path: Path) -> None:
    inventory = measured("alps", ("IDLE", {"a100": 4}, 500.0), ("IDLE", {"nvidia_a100_3g.20gb": 8}, 500.0))
    write_inventory(tmp_path / "alps.json", inventory)
    gres = {"a100": "a100-40gb", "nvidia_a100_3g.20gb": "a100-40gb-3g.20gb"}
    document = {"name": "alps", "gres": gres, "inventory": str(tmp_path / "alps.json")}
    (found,) = read_sites([written(tmp_path / "alps.yaml", document)], None).sites
    assert [(node.gpu, node.gpus, node.gres) for node in found.nodes] == [
        ("a100-40gb", 4, "a100"),
        ("a100-40gb-3g.20gb", 8, "nvidia_a100_3g.20gb"),
    ]


def test_a_feature_of_the_node_says_nothing_of_its_slices() -> None:
    inventory = measured("alps", ("IDLE", {"1g.10gb": 7}, 99.0))
    (node,) = inventory.nodes
    featured = type(inventory)(**{**vars(inventory), "nodes": (type(node)(**{**vars(node), "features": ("h100",)}),)})
    with pytest.raises(
        UsageError, match=r"alps: its GPUs gpu:1g.10gb on n0 are slices .*\{1g.10gb: a100-40gb-1g.10gb\}"
    ):
        node_groups(featured, {"h100": "h100"}, [])
    (group,) = node_groups(featured, {"h100": "h100", "1g.10gb": "h100-1g.10gb"}, [])
    assert (group.gpu, group.gpus) == ("h100-1g.10gb", 7)


def test_whole_gpus_may_have_any_name() -> None:
    document = site({"small": "a100-40gb-3g.20gb", "a100": "a100-40gb"})
    assert SiteFile.model_validate(document).gres["small"] == "a100-40gb-3g.20gb"
