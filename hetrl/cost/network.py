"""Seconds of communication: one transfer, the collectives inside a node, rings over nodes and sites.

Every bandwidth is one direction; a transfer is alpha + bytes / beta (`Path.seconds`). No link: infinite time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

from hetrl.cost import formulas
from hetrl.hardware import Device, Node, Path, Topology, wire_seconds
from hetrl.plan.plan import site_of

Direction = tuple[str, str]  # (from site, to site)
NO_PATH = Path(delay_ms=math.inf, gbps=1e-9)  # not 0: bytes are divided by it


def path(topology: Topology, device: Device, other: Device) -> Path:
    """Return what lies between two devices; `NO_PATH` where nothing does."""
    return topology.path(device, other) or NO_PATH


def slowest(topology: Topology, devices: Sequence[Device]) -> Path | None:
    """Return the slowest edge of the ring through the devices; None for a single one."""
    if len(devices) < 2:
        return None
    edges = [path(topology, a, b) for a, b in pairwise((*devices, devices[0]))]
    return Path(max(edge.delay_ms for edge in edges), min(edge.gbps for edge in edges))


def all_reduce_seconds(ranks: int, transferred_bytes: float, edge: Path | None) -> float:
    """Return the time of one all-reduce among directly connected ranks (tensor parallelism inside a node).

    2 alpha + 2 (n-1)/n bytes / beta: reduce-scatter and all-gather, each one exchange with all peers at once.
    Source: Thakur et al., IJHPCA 2005, section 4.
    """
    if edge is None or ranks < 2:
        return 0.0
    seconds_per_byte = wire_seconds(1, edge.gbps)
    return 2 * edge.delay_ms / 1e3 + 2 * (ranks - 1) / ranks * transferred_bytes * seconds_per_byte


def by_site(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """Return the devices of each site, in their order."""
    sites: dict[str, list[Device]] = {}
    for device in devices:
        sites.setdefault(device.site, []).append(device)
    return sites


def gateways_of(topology: Topology, devices: Iterable[Device]) -> dict[str, Node]:
    """Return of each site the best-connected of the devices' nodes: what crosses between sites crosses there."""
    best: dict[str, Node] = {}
    for device in _one_per_node(devices):
        node = topology.node_by_id[device.node_id]
        best[device.site] = max(best.get(device.site, node), node, key=lambda one: one.reach)
    return best


def gateway_path(topology: Topology, gateways: Mapping[str, Node], direction: Direction) -> Path:
    """Return the path between the gateways of two sites."""
    link, (source, target) = topology.link(*direction), direction
    if link is None or link.gbps <= 0 or source not in gateways or target not in gateways:
        return NO_PATH
    return Path(link.delay_ms, min(link.gbps, *(gateways[site].uplink_gbps for site in direction)))


def gateway_bytes(loads: Mapping[Direction, float]) -> dict[str, float]:
    """Return the bytes through each site's gateway in the direction that has more: out of the site, or into it."""
    leaving, arriving = defaultdict[str, float](float), defaultdict[str, float](float)
    for (source, target), load in loads.items():
        leaving[source] += load
        arriving[target] += load
    return {site: max(leaving[site], arriving[site]) for site in {*leaving, *arriving}}


def uplink_seconds(gateways: Mapping[str, Node], loads: Mapping[Direction, float]) -> float:
    """Return how long the slowest gateway takes for all that leaves its site, or that arrives, at the same time."""
    passing = gateway_bytes(loads).items()
    return max((wire_seconds(load, gateways[site].uplink_gbps) for site, load in passing if load > 0), default=0.0)


def _one_per_node(devices: Iterable[Device]) -> list[Device]:
    return list({(device.site, device.node): device for device in devices}.values())


@dataclass(frozen=True)
class Ring:
    """Ranks that reduce the same gradients: `gradient_bytes` each, `parameter_bytes` gathered again if sharded.

    Over links between sites go the share `packed` of the gradients and the share `gathered` of the parameters
    (`hetrl.cost.model`).
    """

    devices: tuple[Device, ...]
    gradient_bytes: float
    parameter_bytes: float
    sharded: bool
    packed: float = 1.0
    gathered: float = 1.0


@dataclass(frozen=True)
class Reduction:
    """The seconds of a data-parallel reduction: of the gradients, and of gathering parameters behind the update."""

    reduce: float
    gather: float

    @property
    def seconds(self) -> float:
        """Return the time of both, where nothing goes on beside them."""
        return self.reduce + self.gather

    def behind(self, backward: float, parameters: float, replicas: int) -> float:
        """Return what is left of it behind a backward pass of so many seconds that makes a rank's gradients."""
        buckets = formulas.bucket_count(parameters, replicas)
        return formulas.exposed_seconds(self.reduce, backward, buckets) + self.gather


def reduction_of(topology: Topology, rings: Sequence[Ring], sharing: Mapping[Direction, int]) -> Reduction:
    """Return the time of the data-parallel reduction of all rings of a task, once.

    Each site sums first, in a ring of those n of the ranks that it has. All rings run at the same time, so an edge
    takes its load over its bandwidth and the slowest edge is the time of a phase:
      inside a node  2 (n-1)/n bytes over `peer_gbps`, for each ring (they have separate lanes)
      between nodes  the same, over the node's NIC, summed over all rings that leave the node for another of the site
      between sites  `wan_phases` of all rings, each over the link from site to site, all of a site's over the uplink of
                     its gateway, and behind the rings of the site's busiest node over the gateway's NIC
    plus 2 (n-1) alpha of the slowest kind of edge on its level, 2 alpha between sites. With a sharded optimiser the
    gradients are only scattered, and the (smaller) parameters gathered in a phase of their own, which has half of the
    delays.
    """
    lanes, latency = [0.0, 0.0], 0.0
    cards: tuple[defaultdict[str, float], ...] = (defaultdict(float), defaultdict(float))
    for ring in rings:
        if len(ring.devices) < 2:
            continue
        for members in by_site(ring.devices).values():
            ranks, nodes = len(members), _one_per_node(members)
            moved = (
                formulas.ring_reduce_bytes(ranks, ring.gradient_bytes, ring.sharded),
                formulas.ring_gather_bytes(ranks, ring.parameter_bytes, ring.sharded),
            )
            for phase, load in enumerate(moved):
                if len(nodes) < ranks:
                    slowest = max(wire_seconds(load, _peer_gbps(topology, node)) for node in nodes)
                    lanes[phase] = max(lanes[phase], slowest)
                for node in nodes if len(nodes) > 1 else ():
                    cards[phase][node.node_id] += load
        latency = max(latency, _latency_seconds(topology, ring))
    first = 0.5 if any(ring.sharded for ring in rings) else 1.0
    delays = first * latency, (1 - first) * latency
    gateways = gateways_of(topology, (device for ring in rings for device in ring.devices))
    nics, links = [], []
    for own, sent in zip(cards, wan_phases(rings), strict=True):
        loads = {way: load * sharing.get(way, 1) for way, load in sent.items()}
        ways = (wire_seconds(load, gateway_path(topology, gateways, way).gbps) for way, load in loads.items())
        links.append(max([*ways, uplink_seconds(gateways, loads)]))
        nics.append(_card_seconds(topology, own, gateways, gateway_bytes(loads)))
    return Reduction(*map(formulas.rings_seconds, lanes, nics, links, delays))


def _card_seconds(
    topology: Topology, cards: Mapping[str, float], gateways: Mapping[str, Node], passing: Mapping[str, float]
) -> float:
    """Return the time of the busiest NIC: the rings of each node, and what passes the gateway of its site."""
    busiest: defaultdict[str, float] = defaultdict(float)
    for node_id, load in cards.items():
        node = topology.node_by_id[node_id]
        site = site_of(node_id)
        busiest[site] = max(busiest[site], wire_seconds(load, node.nic_gbps))
    times = [busiest[site] + wire_seconds(passing.get(site, 0.0), node.nic_gbps) for site, node in gateways.items()]
    return max(times, default=0.0)


def _peer_gbps(topology: Topology, device: Device) -> float:
    return topology.node_by_id[device.node_id].gpu_type.peer_gbps


def _latency_seconds(topology: Topology, ring: Ring) -> float:
    members = Counter(device.site for device in ring.devices)
    sites = [topology.site_by_name[name] for name in members]
    alone = len(_one_per_node(ring.devices)) == len(sites)  # in one node of each site
    delays = [site.node_delay_ms if alone else site.delay_ms for site in sites]
    between = max((link_delay_ms(topology, pair) for pair in combinations(members, 2)), default=0.0)
    return formulas.ring_latency([*members.values()], delays, between) / 1e3


def link_delay_ms(topology: Topology, pair: Direction) -> float:
    """Return the delay of the link between two sites; infinite without one."""
    link = topology.link(*pair)
    return link.delay_ms if link else math.inf


def wan_phases(rings: Sequence[Ring]) -> tuple[dict[Direction, float], dict[Direction, float]]:
    """Return the bytes per direction between sites of one reduction, and those of the gather behind the update."""
    reduced: defaultdict[Direction, float] = defaultdict(float)
    gathered: defaultdict[Direction, float] = defaultdict(float)
    for ring in rings:
        members = Counter(device.site for device in ring.devices)
        sites, ranks = [*members], len(ring.devices)
        for source, target in permutations(sites, 2):
            packed, changed = ring.packed * ring.gradient_bytes, ring.gathered * ring.parameter_bytes
            reduced[source, target] += formulas.wan_reduce_bytes(
                members[target], ranks, len(sites), packed, ring.sharded
            )
            gathered[source, target] += formulas.wan_gather_bytes(members[source], ranks, changed, ring.sharded)
    return dict(reduced), dict(gathered)


def wan_reduction_bytes(rings: Sequence[Ring]) -> dict[Direction, float]:
    """Return the bytes of both phases of one reduction per direction between sites."""
    reduced, gathered = wan_phases(rings)
    return {direction: load + gathered[direction] for direction, load in reduced.items()}


def link_seconds(topology: Topology, direction: Direction, load: float) -> float:
    """Return the time of so many bytes over the link between two sites, without its delay; infinite without a link."""
    link = topology.link(*direction)
    if load <= 0:
        return 0.0
    return wire_seconds(load, link.gbps) if link and link.gbps > 0 else math.inf
