"""GPUs, nodes, sites and links: the device topology graph G_D of HetRL (arXiv 2512.12476, section 3).

A device is named `site/node/index`. Bandwidths are one direction. `gbps` is 1e9 bits per second; delays are one way, in
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hetrl.errors import UsageError, nearest
from hetrl.gpus import GpuType, check_described, check_number, gpu_type

ENGINES = ("megatron", "vllm")


@dataclass(frozen=True, order=True)
class NodeKind:
    """A site's nodes of one GPU type and size; the planner's device classes are finer (`hetrl.search.space`)."""

    site: str
    gpu: str
    gpus_per_node: int

    @property
    def name(self) -> str:
        """Return `site:gpu x size`, as tables show it."""
        return f"{self.site}:{self.gpu}x{self.gpus_per_node}"


@dataclass(frozen=True)
class Device:
    """One GPU (or one `cpu` entry: one rank's share of a machine)."""

    site: str
    node: str
    index: int
    gpu: str

    @property
    def id(self) -> str:
        """Return `site/node/index`."""
        return f"{self.site}/{self.node}/{self.index}"

    @property
    def node_id(self) -> str:
        """Return `site/node`."""
        return f"{self.site}/{self.node}"


@dataclass(frozen=True)
class Node:
    """A machine with equal GPUs.

    `wan_gbps` caps what the node exchanges with other sites where its uplink is slower than the site's; `peer_gbps`
    overrides the catalogue's GPU-to-GPU bandwidth (another board of the same GPU). `described` is the type of its GPUs
    where the catalogue has none of that name. Prices are in one currency everywhere.
    """

    name: str
    gpu: str
    gpus: int
    nic_gbps: float = 100.0
    host_memory_gb: float = 512.0
    wan_gbps: float | None = None
    peer_gbps: float | None = None
    price_per_gpu_hour: float = 0.0
    described: GpuType | None = None

    @cached_property
    def gpu_type(self) -> GpuType:
        """Return the type of its GPUs, with the bandwidth between them on this node."""
        found = self.described or gpu_type(self.gpu)
        return found if self.peer_gbps is None else replace(found, peer_gbps=self.peer_gbps)

    @property
    def uplink_gbps(self) -> float:
        """Return what it exchanges with other sites at most, one direction."""
        return min(self.nic_gbps, self.wan_gbps or self.nic_gbps)

    @property
    def reach(self) -> tuple[float, float]:
        """Return what is largest at the node of a site where the gateway stands: its uplink, then its network card."""
        return self.uplink_gbps, self.nic_gbps


@dataclass(frozen=True)
class Site:
    """One cluster: nodes behind one gateway, with the engines that are installed there.

    `budget_gpu_hours` is the most that a run may spend, `queue_hours` an estimate of how long its jobs wait to start.
    """

    name: str
    nodes: tuple[Node, ...]
    engines: tuple[str, ...] = ENGINES
    allocation: str = "node"  # node | gpu: with `node`, idle GPUs of a granted node still cost
    delay_ms: float = 0.05  # between nodes
    node_delay_ms: float = 0.005  # inside a node
    budget_gpu_hours: float | None = None
    queue_hours: float = 0.0


@dataclass(frozen=True)
class Link:
    """The wide-area link between two sites, the same both ways."""

    between: tuple[str, str]
    delay_ms: float
    gbps: float


def bytes_per_second(gbps: float) -> float:
    """Return what 1e9 bits per second are in bytes."""
    return gbps * 1e9 / 8


def wire_seconds(transferred_bytes: float, gbps: float) -> float:
    """Return how long bytes take on the wire, without its delay."""
    return transferred_bytes * 8 / (gbps * 1e9)


@dataclass(frozen=True)
class Path:
    """What lies between two devices."""

    delay_ms: float
    gbps: float

    def seconds(self, transferred_bytes: float) -> float:
        """Return the time of one transfer: alpha + bytes / beta."""
        return self.delay_ms / 1e3 + wire_seconds(transferred_bytes, self.gbps)


@dataclass(frozen=True)
class Topology:
    """All sites and the links between them."""

    sites: tuple[Site, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        """Refuse duplicate names, unknown GPUs, links to nowhere and numbers that cannot be."""
        _refuse_duplicates("site", (site.name for site in self.sites))
        for site in self.sites:
            _check_site(site)
        _refuse_duplicates("link", ("-".join(sorted(link.between)) for link in self.links))
        for link in self.links:
            _check_link(link, {site.name for site in self.sites})
        _refuse_duplicates("GPU type", (one.name for one in self.described))
        for one in self.described:
            check_described(one)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return every device, in the order of sites and nodes."""
        return tuple(
            Device(site.name, node.name, index, node.gpu)
            for site in self.sites
            for node in site.nodes
            for index in range(node.gpus)
        )

    @cached_property
    def device_by_id(self) -> Mapping[str, Device]:
        """Return the devices by their ids."""
        return {device.id: device for device in self.devices}

    @cached_property
    def site_by_name(self) -> Mapping[str, Site]:
        """Return the sites by their names."""
        return {site.name: site for site in self.sites}

    @cached_property
    def node_by_id(self) -> Mapping[str, Node]:
        """Return the nodes by `site/node`."""
        return {f"{site.name}/{node.name}": node for site in self.sites for node in site.nodes}

    @cached_property
    def node_class(self) -> Mapping[str, int]:
        """Return by `site/node` which nodes of a site are alike in all but their names: 0, 1, ... as they come."""
        known: dict[tuple[str, Node], int] = {}
        return {
            f"{site.name}/{node.name}": known.setdefault((site.name, replace(node, name="")), len(known))
            for site in self.sites
            for node in site.nodes
        }

    def slice_of(self, device: Device) -> str:
        """Return the GPU that a device is a slice of (`GpuType.slice_of`); empty: it is whole."""
        return self.node_by_id[device.node_id].gpu_type.slice_of

    @property
    def whole_gpus(self) -> Topology:
        """Return the topology without the nodes whose GPUs are slices, and the sites that have no others."""
        kept = {site.name: tuple(node for node in site.nodes if not node.gpu_type.slice_of) for site in self.sites}
        sites = tuple(replace(site, nodes=kept[site.name]) for site in self.sites if kept[site.name])
        return Topology(sites, tuple(link for link in self.links if all(kept[end] for end in link.between)))

    @property
    def described(self) -> list[GpuType]:
        """Return the types of GPUs that the catalogue does not have."""
        return list(dict.fromkeys(node.described for site in self.sites for node in site.nodes if node.described))

    @cached_property
    def devices_by_kind(self) -> Mapping[NodeKind, tuple[Device, ...]]:
        """Return the devices in each kind of node, kinds in the order of their first device."""
        found: dict[NodeKind, list[Device]] = {}
        for device in self.devices:
            found.setdefault(self.kind_of(device), []).append(device)
        return {key: tuple(devices) for key, devices in found.items()}

    def kind_of(self, device: Device) -> NodeKind:
        """Return the kind of node that a device is in: its site, GPU type and size."""
        return NodeKind(device.site, device.gpu, self.node_by_id[device.node_id].gpus)

    @cached_property
    def _link_by_sites(self) -> Mapping[frozenset[str], Link]:
        return {frozenset(link.between): link for link in self.links}

    def link(self, site: str, other: str) -> Link | None:
        """Return the link between two sites, None where nobody measured or wrote one."""
        return self._link_by_sites.get(frozenset((site, other)))

    def linked(self, site: str, other: str) -> bool:
        """Return whether two sites are one, or have a link that carries anything."""
        link = self.link(site, other)
        return site == other or (link is not None and link.gbps > 0)

    def path(self, device: Device, other: Device) -> Path | None:
        """Return what lies between two devices: inside a node, inside a site or over a link; None: no link."""
        node, other_node = (self.node_by_id[d.node_id] for d in (device, other))
        site = self.site_by_name[device.site]
        if device.site == other.site and device.node == other.node:
            return Path(site.node_delay_ms, node.gpu_type.peer_gbps)
        if device.site == other.site:
            return Path(site.delay_ms, min(node.nic_gbps, other_node.nic_gbps))
        link = self.link(device.site, other.site)
        if link is None or link.gbps <= 0:
            return None
        return Path(link.delay_ms, min(link.gbps, node.uplink_gbps, other_node.uplink_gbps))


def _refuse_duplicates(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UsageError(f'topology: {kind} "{name}" is there twice; give each {kind} its own name')
        seen.add(name)


def _check_site(site: Site) -> None:
    for label in (site.name, *(node.name for node in site.nodes)):
        if not label or "/" in label or label != label.strip():
            raise UsageError(f'topology: the name "{label}" in site "{site.name}" must be non-empty, without "/"')
    _refuse_duplicates(f"node of site {site.name}", (node.name for node in site.nodes))
    for engine in site.engines:
        if engine not in ENGINES:
            raise UsageError(f'site {site.name}: unknown engine "{engine}"; known: {", ".join(ENGINES)}')
    if site.allocation not in ("node", "gpu"):
        raise UsageError(f'site {site.name}: allocation is "node" or "gpu", not "{site.allocation}"')
    for key in ("delay_ms", "node_delay_ms", "queue_hours"):
        check_number(f"site {site.name}: {key}", getattr(site, key), zero=True)
    if site.budget_gpu_hours is not None:
        check_number(f"site {site.name}: budget_gpu_hours", site.budget_gpu_hours)
    for node in site.nodes:
        _check_node(node, f"site {site.name}, node {node.name}: ")


def _check_node(node: Node, where: str) -> None:
    if node.described is None:
        gpu_type(node.gpu, where)
    if node.gpus < 1:
        raise UsageError(f"{where}{node.gpus} GPUs; a node has at least one")
    for key in ("nic_gbps", "host_memory_gb", "wan_gbps", "peer_gbps"):
        if (value := getattr(node, key)) is not None:
            check_number(where + key, value)
    check_number(f"{where}price_per_gpu_hour", node.price_per_gpu_hour, zero=True)


def _check_link(link: Link, sites: set[str]) -> None:
    where = f"link between {link.between[0]} and {link.between[1]}"
    for end in link.between:
        if end not in sites:
            raise UsageError(f'{where}: there is no site "{end}"{nearest(end, sites)}')
    if link.between[0] == link.between[1]:
        raise UsageError(f"{where}: a link joins two sites")
    for key in ("gbps", "delay_ms"):
        check_number(f"{where}: {key}", getattr(link, key), zero=True)
