"""What the jobs of a plan hold of the sites, as Slurm grants and bills it, and what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hetrl.cost import formulas
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan, node_of, site_of


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


def has_prices(topology: Topology) -> bool:
    """Return whether any GPU has a price; where some have one, the others are free."""
    return any(node.price_per_gpu_hour > 0 for node in topology.node_by_id.values())


def price_per_hour(plan: Plan, topology: Topology) -> float | None:
    """Return the price of an hour of all devices that the jobs hold; None where no GPU has a price."""
    if not has_prices(topology):
        return None
    held = [topology.node_by_id[n] for n, count in held_devices(plan, topology).items() for _ in range(count)]
    return formulas.price_per_hour([1] * len(held), [node.price_per_gpu_hour for node in held])
