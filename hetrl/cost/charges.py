"""What the jobs of a plan hold of the sites, as Slurm grants and bills it, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hetrl.hardware import Topology
from hetrl.plan.plan import Plan, node_of, site_of


def held_devices(plan: Plan, topology: Topology) -> tuple[str, ...]:
    """Return the devices that the jobs hold: those of the groups, and the rest of their nodes where nodes are granted.

    `Site.allocation` says which of both; an idle device of a granted node is held, and paid for, like the others.
    """
    used = dict.fromkeys(device for group in plan.groups for device in group.devices)
    nodes = {node_of(device) for device in used if topology.site_by_name[site_of(device)].allocation == "node"}
    return tuple(device.id for device in topology.devices if device.id in used or node_of(device.id) in nodes)


def held_by_site(plan: Plan, topology: Topology) -> Mapping[str, int]:
    """Return how many devices the jobs hold at each used site."""
    return Counter(site_of(device) for device in held_devices(plan, topology))


def has_prices(topology: Topology) -> bool:
    """Return whether any GPU has a price; where some have one, the others are free."""
    return any(node.price_per_gpu_hour > 0 for node in topology.node_by_id.values())


def price_per_hour(plan: Plan, topology: Topology) -> float | None:
    """Return the price of an hour of all devices that the jobs hold; None where no GPU has a price."""
    if not has_prices(topology):
        return None
    return sum(topology.node_by_id[node_of(device)].price_per_gpu_hour for device in held_devices(plan, topology))
