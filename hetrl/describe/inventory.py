"""What a Slurm cluster has, as `hetrl discover` measured it: `topology/measured/SITE.json`, format `hetrl-inventory/1`.

A measurement is never edited by hand. It wins over what a person wrote of the nodes in the site's file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hetrl.describe.slices import profile_of, remedy
from hetrl.errors import UsageError, nearest
from hetrl.files import replace_json

INVENTORY_FORMAT = "hetrl-inventory/1"
# States in which a node takes no job, and may for days: NODE STATE CODES of sinfo(1). One that is powered down to save
# power is powered up for a job.
_OUT_OF_SERVICE = {
    *("DOWN", "DRAIN", "FAIL", "INVAL", "INVALID_REG", "MAINT", "MAINTENANCE", "UNKNOWN", "FUTURE", "NOT_RESPONDING")
}


@dataclass(frozen=True)
class ClusterNode:
    """One node. `gpus` and `gpus_used` count by GRES type; `memory_gb` is what Slurm may hand out."""

    name: str
    gpus: Mapping[str, int]
    gpus_used: Mapping[str, int]
    cpus: int
    memory_gb: float
    features: tuple[str, ...]
    partitions: tuple[str, ...]
    states: tuple[str, ...]
    reason: str = ""

    @property
    def in_service(self) -> bool:
        """Return whether Slurm gives the node to jobs, now or when it is free."""
        return not _OUT_OF_SERVICE.intersection(self.states)


@dataclass(frozen=True)
class Partition:
    """One partition; a limit that Slurm does not set is None."""

    name: str
    default: bool
    up: bool
    max_seconds: float | None
    default_seconds: float | None
    min_nodes: int
    max_nodes: int | None
    accounts: tuple[str, ...] | None  # None: all


@dataclass(frozen=True)
class Reservation:
    """Nodes that Slurm keeps for somebody."""

    name: str
    nodes: str
    starts: str
    ends: str
    users: str


@dataclass(frozen=True)
class Inventory:
    """A cluster at one moment; `switches` are the node lists below each leaf switch."""

    site: str
    cluster: str
    slurm_version: str
    measured_at: str
    max_array_size: int
    mpi_default: str
    federated: bool
    partitions: tuple[Partition, ...]
    nodes: tuple[ClusterNode, ...]
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()

    def taking_jobs(self, named: Sequence[str]) -> tuple[str, ...]:
        """Return the partitions that jobs go to: those that the site's file names, else the cluster's default one."""
        return tuple(named) or tuple(partition.name for partition in self.partitions if partition.default)

    def to_json(self) -> dict[str, Any]:
        """Return the document of `topology/measured/SITE.json`."""
        return {"format": INVENTORY_FORMAT, **asdict(self)}


def write_inventory(path: Path, inventory: Inventory) -> None:
    """Replace the measured file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_json(path, inventory.to_json())


def read_inventory(path: Path) -> Inventory:
    """Read a measured file; raises UsageError where it is not one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("format", None) != INVENTORY_FORMAT:
            raise ValueError(f"its format is not {INVENTORY_FORMAT}")
        return msgspec.convert(document, Inventory)
    except (ValueError, AttributeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: not an inventory: {error}; run `hetrl discover` again") from None


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a cluster: what the planner takes as `count` nodes of `gpus` GPUs `gpu`."""

    gres: str
    gpu: str
    gpus: int
    memory_gb: float
    cpus: int
    nodes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Return the number of nodes."""
        return len(self.nodes)


def node_groups(inventory: Inventory, gpu_of_gres: Mapping[str, str], partitions: Sequence[str]) -> list[NodeGroup]:
    """Return the GPU nodes in service, grouped by type and size, in the order of the cluster.

    `gpu_of_gres` maps a GRES type, else a node feature, to the catalogue; the nodes are those of `partitions`, without
    any of the default partition, or of all where the cluster has none. Of a node with several types of GPUs each has
    an equal part of the memory and CPUs. Slices of a GPU (MIG) are mapped by their GRES type alone: a feature says
    what the node's whole GPUs are. GPUs that nothing maps are left out; raises UsageError where no others are there,
    and for a partition that is not.
    """
    known = [partition.name for partition in inventory.partitions]
    for name in partitions:
        if name not in known:
            raise UsageError(
                f'{inventory.site}: there is no partition "{name}"{nearest(name, known)}; known: {", ".join(known)}'
            )
    found, unknown = _grouped(inventory, gpu_of_gres, partitions)
    if unknown and not found:
        raise UsageError(unknown[0])
    return found


def unmapped_gpus(inventory: Inventory, gpu_of_gres: Mapping[str, str], partitions: Sequence[str]) -> list[str]:
    """Return what is to be written where GPUs of these partitions are left out for their name, a line for each kind."""
    return _grouped(inventory, gpu_of_gres, partitions)[1]


def _grouped(
    inventory: Inventory, gpu_of_gres: Mapping[str, str], partitions: Sequence[str]
) -> tuple[list[NodeGroup], list[str]]:
    limits = set(inventory.taking_jobs(partitions))
    groups: dict[tuple[str, str, int, float, int], list[str]] = {}
    unknown: dict[str, list[ClusterNode]] = {}
    for node in inventory.nodes:
        if not node.in_service or (limits and not limits.intersection(node.partitions)):
            continue
        kinds = {gres: gpu for gres in node.gpus if (gpu := _gpu_of(node, gres, gpu_of_gres)) is not None}
        for gres in node.gpus.keys() - kinds.keys():
            unknown.setdefault(gres, []).append(node)
        for gres, gpu in kinds.items():
            key = (gres, gpu, node.gpus[gres], node.memory_gb / len(kinds), node.cpus // len(kinds))
            groups.setdefault(key, []).append(node.name)
    found = [NodeGroup(*key, tuple(names)) for key, names in groups.items()]
    return found, [_complaint(inventory.site, gres, nodes) for gres, nodes in unknown.items()]


def _gpu_of(node: ClusterNode, gres: str, gpu_of_gres: Mapping[str, str]) -> str | None:
    features = () if profile_of(gres) is not None else sorted(node.features)
    return next((gpu_of_gres[name] for name in (gres, *features) if name in gpu_of_gres), None)


def _complaint(site: str, gres: str, nodes: Sequence[ClusterNode]) -> str:
    called = f"its GPUs gpu:{gres}" if gres else "its GPUs, which have no type"
    if profile_of(gres) is not None:
        return f"{site}: {called} on {nodes[0].name} are slices of a GPU (MIG); {remedy(gres)}"
    features = sorted(set.intersection(*(set(node.features) for node in nodes)))
    has = f" or one of the features {', '.join(features)}" if features else ""
    return (
        f"{site}: which GPU of the catalogue {called} on {nodes[0].name} are is not known; write "
        f"`gres: {{{gres or 'FEATURE'}: NAME}}`{has} in the site's file"
    )


def gigabytes(mebibytes: float) -> float:
    """Return Slurm's memory (MiB) in GB, rounded down to whole ones."""
    return float(math.floor(mebibytes * 2**20 / 1e9))


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the names that a Slurm host list stands for: `a-n[1-2,07],b` is a-n1, a-n2, a-n07, b."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            ends = [plain] if plain else [name for piece in ranges.split(",") for name in _range(piece)]
            names = [name + end for name in names for end in ends]
        found += names
    return tuple(found)


def _range(piece: str) -> list[str]:
    first, dash, last = piece.partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
