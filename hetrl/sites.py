"""Site, link and scenario files: what people write about clusters, and the `Topology` that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hetrl.errors import UsageError
from hetrl.hardware import ENGINES, Link, Node, Site, Topology
from hetrl.yaml_file import Strict, read_yaml

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class NodeEntry(Strict):
    """`count` equal nodes; they are named `name-0`, `name-1`, ... where count is above one."""

    name: str
    gpu: str
    gpus: Annotated[int, Field(ge=1)]
    count: Annotated[int, Field(ge=1)] = 1
    nic_gbps: Positive = 100.0
    host_memory_gb: Positive = 512.0
    wan_gbps: Positive | None = None
    peer_gbps: Positive | None = None

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that the entry stands for."""
        names = [self.name] if self.count == 1 else [f"{self.name}-{index}" for index in range(self.count)]
        shared = self.model_dump(exclude={"name", "count"})
        return tuple(Node(name=name, **shared) for name in names)


class SiteFile(Strict):
    """One cluster as `topology/sites/NAME.yaml` describes it."""

    name: str
    ssh: str = "local"  # a host of the user's OpenSSH configuration, or local
    account: str | None = None
    qos: str | None = None
    partitions: tuple[str, ...] = ()
    gres: dict[str, str] = Field(default_factory=dict)  # Slurm's GRES (or feature) name -> catalogue GPU
    allocation: Literal["node", "gpu"] = "node"
    modules: tuple[str, ...] = ()
    container: str | None = None
    scratch: str | None = None
    egress: Literal["direct", "ssh", "relay", "proxy"] = "direct"
    relay: str | None = None
    interface: str | None = None
    gateway_host: str = "127.0.0.1"
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port
    budget_gpu_hours: Positive | None = None
    price_per_gpu_hour: NotNegative = 0.0
    engines: tuple[str, ...] = ENGINES
    delay_ms: NotNegative = 0.05
    node_delay_ms: NotNegative = 0.005
    nodes: tuple[NodeEntry, ...] = ()

    def site(self) -> Site:
        """Return what the planner needs of the file."""
        if not self.nodes:
            raise UsageError(f"site {self.name}: no nodes are listed; write them under `nodes`")
        return Site(
            name=self.name,
            nodes=tuple(node for entry in self.nodes for node in entry.nodes()),
            engines=self.engines,
            allocation=self.allocation,
            delay_ms=self.delay_ms,
            node_delay_ms=self.node_delay_ms,
            price_per_gpu_hour=self.price_per_gpu_hour,
            budget_gpu_hours=self.budget_gpu_hours,
        )


class LinkEntry(Strict):
    """One wide-area link: one-way delay, bandwidth in one direction."""

    between: tuple[str, str]
    delay_ms: NotNegative
    gbps: NotNegative

    def link(self) -> Link:
        """Return the planner's link."""
        return Link(self.between, self.delay_ms, self.gbps)


class LinksFile(Strict):
    """`topology/links.yaml`."""

    links: tuple[LinkEntry, ...]


class ScenarioFile(Strict):
    """Sites and links in one file, to plan for without a cluster."""

    sites: tuple[SiteFile, ...] = Field(min_length=1)
    links: tuple[LinkEntry, ...] = ()


def read_sites(paths: list[Path], links: Path | None) -> ScenarioFile:
    """Read site files and a links file."""
    sites = [read_yaml(path, SiteFile) for path in paths]
    return ScenarioFile(sites=tuple(sites), links=read_yaml(links, LinksFile).links if links else ())


def read_scenario(path: Path) -> ScenarioFile:
    """Read a scenario file."""
    return read_yaml(path, ScenarioFile)


def topology_of(scenario: ScenarioFile) -> Topology:
    """Return the planner's topology; raises UsageError for names and numbers that cannot be."""
    return Topology(
        sites=tuple(site.site() for site in scenario.sites), links=tuple(entry.link() for entry in scenario.links)
    )
