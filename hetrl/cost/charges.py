"""What the jobs of a plan hold of the sites, as Slurm grants and bills it, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hetrl.cost import formulas
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan, node_of, site_of

Kind = tuple[str, str, float]  # site, GPU type, price of a GPU-hour


def held_devices(plan: Plan, topology: Topology) -> Mapping[str, int]:
    """Return how many devices of each node the jobs hold: those of the groups, and the rest where nodes are granted.

    `Site.allocation` says which of both; an idle device of a granted node is held, and paid for, like the others.
    """
    used = Counter(node_of(device) for device in {device for group in plan.groups for device in group.devices})
    found = {}
    for name, node in topology.node_by_id.items():
        if name in used:
            whole = topology.site_by_name[site_of(name)].allocation == "node"
            found[name] = formulas.held_devices(used[name], 1, node.gpus, whole)
    return found


def held_by_site(plan: Plan, topology: Topology) -> Mapping[str, int]:
    """Return how many devices the jobs hold at each used site."""
    found: Counter[str] = Counter()
    for node, count in held_devices(plan, topology).items():
        found[site_of(node)] += count
    return found


@dataclass(frozen=True)
class Asked:
    """What a plan asks a site for: so many of the GPUs of one type that are offered there, at a price each and hour."""

    site: str
    gpu: str
    gpus: int
    offered: int
    price_per_gpu_hour: float

    @property
    def price_per_hour(self) -> float:
        """Return the price of an hour of all of them."""
        return self.gpus * self.price_per_gpu_hour


def offered(topology: Topology) -> Mapping[Kind, int]:
    """Return how many GPUs there are by site, GPU type and price, in the order of the topology."""
    return _by_kind(topology, {name: node.gpus for name, node in topology.node_by_id.items()})


def asked_for(plan: Plan, topology: Topology) -> tuple[Asked, ...]:
    """Return what the jobs hold by site, GPU type and price, in the order of the topology."""
    held = _by_kind(topology, held_devices(plan, topology))
    return tuple(
        Asked(kind[0], kind[1], held[kind], count, kind[2]) for kind, count in offered(topology).items() if kind in held
    )


def _by_kind(topology: Topology, gpus: Mapping[str, int]) -> Mapping[Kind, int]:
    """Return the sums of these numbers of GPUs, {node: GPUs}."""
    found: Counter[Kind] = Counter()
    for name, count in gpus.items():
        node = topology.node_by_id[name]
        found[site_of(name), node.gpu, node.price_per_gpu_hour] += count
    return found


def has_prices(topology: Topology) -> bool:
    """Return whether any GPU has a price; where some have one, the others are free."""
    return any(node.price_per_gpu_hour > 0 for node in topology.node_by_id.values())


def price_per_hour(plan: Plan, topology: Topology) -> float | None:
    """Return the price of an hour of all devices that the jobs hold; None where no GPU has a price."""
    if not has_prices(topology):
        return None
    asked = asked_for(plan, topology)
    return formulas.price_per_hour([one.gpus for one in asked], [one.price_per_gpu_hour for one in asked])
