"""Site and scenario files: what people write about clusters, and the `Topology` that follows from it."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hetrl.describe.container import ContainerEntry
from hetrl.describe.inventory import NodeGroup, node_groups, read_inventory
from hetrl.describe.links import Links, LinksFile
from hetrl.describe.sbatch_options import KEYED, OWN, refuse_options
from hetrl.describe.slices import refusal
from hetrl.describe.yaml_file import AtLeastOne, Name, NotNegative, Positive, Strict, read_yaml
from hetrl.errors import UsageError
from hetrl.gpus import GpuType, gpu_type
from hetrl.hardware import ENGINES, Node, Site, Topology

Login = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][^\s]*$")]  # user@host, or a host of OpenSSH's configuration
Way = Literal["direct", "ssh", "relay", "proxy"]
WayIn = Literal["direct", "ssh", "relay", "closed"]
GATEWAY_MEMORY_GB = 4.0  # of a gateway's process: its lanes to each destination hold 0.5 GB
DEFAULT_RELAY_SECRET = "~/.config/hetrl/relay.secret"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _is_address(text: str) -> str:
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f'"{text}" is not an address; write host:port, as login.example.org:7443')
    return text


def _is_one_cluster(name: str) -> str:
    if name == "all" or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f'"{name}" is not the name of one cluster; see `sacctmgr show clusters` there')
    return name


Address = Annotated[str, AfterValidator(_is_address)]
Cluster = Annotated[str, AfterValidator(_is_one_cluster)]
MOST_GPUS = 2**17  # of an entry of nodes: each is a device of its own to the planner
Absolute = Annotated[str, Field(pattern=r"^/.*[^/]$")]
Option = Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[^\n]+)?$")]  # of sbatch


def _unprintable(value: object) -> str | None:
    """Return the first text somewhere in a value that does not stay on one line; None where all do."""
    if isinstance(value, str):
        return None if value.isprintable() else value
    parts = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((text for part in parts if (text := _unprintable(part)) is not None), None)


class NodeEntry(Strict):
    """`count` equal nodes; they are named `name-0`, `name-1`, ... where count is above one."""

    name: str
    gpu: str
    gpus: AtLeastOne
    count: AtLeastOne = 1
    nic_gbps: Positive = 100.0
    host_memory_gb: Positive = 512.0
    wan_gbps: Positive | None = None
    peer_gbps: Positive | None = None
    gres: str | None = None  # Slurm's type of these GPUs, where the site's `gres` maps several to the same one

    @model_validator(mode="after")
    def _not_too_many(self) -> NodeEntry:
        if self.gpus * self.count > MOST_GPUS:
            raise ValueError(f"{self.count:,} nodes of {self.gpus:,} GPUs; an entry has at most {MOST_GPUS:,} GPUs")
        return self

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return the names of the nodes that the entry stands for."""
        return (self.name,) if self.count == 1 else tuple(f"{self.name}-{index}" for index in range(self.count))

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that the entry stands for."""
        shared = self.model_dump(exclude={"name", "count", "gres"})
        return tuple(Node(name=name, **shared) for name in self.node_names)


class GpuEntry(Strict):
    """A type of GPU that the catalogue does not have; the units of `hetrl/catalogue/gpus.yaml`."""

    peak_tflops: Positive
    memory_gb: Positive
    memory_gb_per_s: Positive
    peer_gbps: Positive
    host_gbps: Positive
    usable_memory: Annotated[float, Field(gt=0, le=1)] = 0.92
    like: str = ""
    slice_of: str = ""  # the GPU that it is a slice of (MIG), by any name: it works alone
    source: str = ""


class SiteFile(Strict):
    """One cluster as `topology/sites/NAME.yaml` describes it."""

    name: Name
    ssh: str = "local"  # a host of the user's OpenSSH configuration, or local
    cluster: Cluster | None = None  # as Slurm's -M names it; none: the one of the login node
    account: str | None = None
    qos: str | None = None
    partitions: tuple[str, ...] = ()
    gpus: dict[str, GpuEntry] = Field(default_factory=dict)  # types that the catalogue does not have, by name
    gres: dict[str, str] = Field(default_factory=dict)  # Slurm's GRES (or feature) name -> GPU
    allocation: Literal["node", "gpu"] = "node"
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gres"  # how jobs ask for GPUs
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # lines of bash that a job runs first, after the modules
    container: ContainerEntry | None = None
    python: str = "python3"  # the interpreter of the environment with the engines
    prefix: tuple[str, ...] = ()  # words before every command: a container runtime, a network namespace
    paths: dict[Absolute, Absolute] = Field(default_factory=dict)  # what the experiment names -> where it is here
    scratch: str | None = None
    mpi: Literal["none", "pmi2", "pmix"] = "none"  # as srun's --mpi, of the training ranks
    cpu_bind: Annotated[str, Field(pattern=r"^[a-z_]+(:[0-9A-Za-z,x]+)?$")] = "none"  # as srun's --cpu-bind
    cpus_per_gpu: AtLeastOne = 4  # asked for where allocation is gpu
    sbatch: tuple[Option, ...] = ()  # more options of every job, as --reservation=rl
    gateway_sbatch: tuple[Option, ...] = ()  # and of a job that is a gateway alone, as --partition=cpu
    egress: Way = "direct"  # how the site's gateway gets out ...
    ingress: WayIn | None = None  # ... and how the others get in; see `way_in`
    ways: dict[str, Way] = Field(default_factory=dict)  # the way to a site by its name, instead of what follows
    login: Login | None = None
    ssh_config: str | None = None
    relay: Address | None = None
    relay_secret: str = DEFAULT_RELAY_SECRET
    proxy: Address | None = None
    proxy_credentials: str | None = None
    interface: str | None = None
    gateway_host: str = "127.0.0.1"
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port
    budget_gpu_hours: Positive | None = None
    price_per_gpu_hour: NotNegative | dict[str, NotNegative] = 0.0  # of every GPU, or by the catalogue's name
    queue_hours: NotNegative = 0.0  # how long the site's jobs are expected to wait until they start
    engines: tuple[str, ...] = ENGINES
    delay_ms: NotNegative = 0.05
    node_delay_ms: NotNegative = 0.005
    nodes: tuple[NodeEntry, ...] = ()
    inventory: str | None = None  # a file of `hetrl discover`; the nodes that it counts win over those written here

    @model_validator(mode="after")
    def _on_one_line(self) -> SiteFile:
        """What is written here goes into scripts and command lines, where a line break begins something else."""
        for key, value in self.model_dump().items():
            if (text := _unprintable(value)) is not None:
                raise ValueError(f"{key}: {text!r} has a line break or another control character; take it out")
        return self

    @model_validator(mode="after")
    def _named_what_it_takes(self) -> SiteFile:
        for key, way, needed in (
            ("egress", "proxy", "proxy"),
            ("egress", "relay", "relay"),
            ("ingress", "relay", "relay"),
            ("ingress", "ssh", "login"),
        ):
            if getattr(self, key) == way and getattr(self, needed) is None:
                raise ValueError(f"{key}: {way} needs `{needed}`")
        return self

    @model_validator(mode="after")
    def _without_options_of_the_run(self) -> SiteFile:
        refuse_options("sbatch", self.sbatch, (*OWN, *KEYED))
        refuse_options("gateway_sbatch", self.gateway_sbatch, (*OWN, "clusters", "time"))
        return self

    @model_validator(mode="after")
    def _whole_nodes_where_slurm_knows_no_gpus(self) -> SiteFile:
        if self.gpu_request == "none" and self.allocation == "gpu":
            raise ValueError("gpu_request: none needs allocation: node: Slurm hands out no GPUs that it does not know")
        return self

    @model_validator(mode="after")
    def _mapped_to_what_they_are(self) -> SiteFile:
        for gres, name in self.gres.items():
            gpu = self.described(name) or gpu_type(name, f"site {self.name}: gres {gres}: ")
            if message := refusal(gres, gpu):
                raise ValueError(message)
        return self

    @property
    def setup_lines(self) -> tuple[str, ...]:
        """Return what a job's shell runs before anything else: what loads the modules, and `setup`."""
        return (*(f"module load {shlex.quote(module)}" for module in self.modules), *self.setup)

    def place(self, name: str) -> str:
        """Return where a file or directory of the experiment is here: the longest beginning in `paths` is replaced."""
        path = PurePosixPath(name)
        fitting = [beginning for beginning in self.paths if path.is_relative_to(beginning)]
        longest = max(fitting, key=len, default=None)
        return name if longest is None else str(PurePosixPath(self.paths[longest]) / path.relative_to(longest))

    @property
    def way_in(self) -> WayIn:
        """Return how others reach the site's gateway: over the relay where one is named and nothing else is said."""
        return self.ingress or ("relay" if self.relay else "direct")

    def site(self) -> Site:
        """Return what the planner needs of the file."""
        if not self.nodes:
            raise UsageError(
                f"site {self.name}: no nodes are listed; write them under `nodes`, or name the file of "
                "`hetrl discover` under `inventory`"
            )
        return Site(
            name=self.name,
            nodes=tuple(
                replace(node, price_per_gpu_hour=self._price(entry.gpu), described=self.described(entry.gpu))
                for entry in self.nodes
                for node in entry.nodes()
            ),
            engines=self.engines,
            allocation=self.allocation,
            delay_ms=self.delay_ms,
            node_delay_ms=self.node_delay_ms,
            budget_gpu_hours=self.budget_gpu_hours,
            queue_hours=self.queue_hours,
        )

    def described(self, gpu: str) -> GpuType | None:
        """Return the type of this name that the file describes, if it does."""
        entry = self.gpus.get(gpu)
        return GpuType(gpu, interconnect="", **entry.model_dump()) if entry else None

    def _price(self, gpu: str) -> float:
        """Return the price of an hour of a GPU of this type; raises UsageError where only others have one."""
        if not isinstance(self.price_per_gpu_hour, dict):
            return self.price_per_gpu_hour
        for name in self.price_per_gpu_hour:
            if name not in self.gpus:
                gpu_type(name, f"site {self.name}: price_per_gpu_hour: ")
        if gpu not in self.price_per_gpu_hour:
            raise UsageError(f"site {self.name}: price_per_gpu_hour: no price of {gpu}; add it, 0 where it is free")
        return self.price_per_gpu_hour[gpu]


class ScenarioFile(Strict):
    """Sites and links in one file, to plan for without a cluster."""

    sites: tuple[SiteFile, ...] = Field(min_length=1)
    links: Links = ()


def read_sites(paths: list[Path], links: Path | None) -> ScenarioFile:
    """Read site files, with the inventories that they name, and a links file."""
    sites = [with_measured_nodes(read_yaml(path, SiteFile)) for path in paths]
    return ScenarioFile(sites=tuple(sites), links=read_yaml(links, LinksFile).links if links else ())


def with_measured_nodes(site: SiteFile) -> SiteFile:
    """Give a site that names an inventory the nodes in service there, a kind at a time.

    A relative name is of the working directory, where `hetrl discover` writes. What Slurm does not know (networks, the
    memory where it counts none) is that of the entry under `nodes` with the same GPU, else the default. Raises
    UsageError where the file is not there, is of another site, or has GPUs that `gres` does not map. A site whose Slurm
    knows of no GPUs keeps the nodes that are written.
    """
    if site.inventory is None or site.gpu_request == "none":
        return site
    path = Path(site.inventory)
    if not path.is_file():
        raise UsageError(f"site {site.name}: inventory: there is no {path}; run `hetrl discover` on the site's file")
    inventory = read_inventory(path)
    if inventory.site != site.name:
        raise UsageError(f"site {site.name}: inventory: {path} is of site {inventory.site}")
    groups = node_groups(inventory, site.gres, site.partitions)
    names = Counter(name for group in groups for name in group.nodes)
    if site.allocation == "node" and (several := [name for name, kinds in names.items() if kinds > 1]):
        raise UsageError(
            f"site {site.name}: {several[0]} has several types of GPUs, each of which would get the whole node; write "
            "`allocation: gpu`"
        )
    gpus = [group.gpu for group in groups]
    entries = [_entry(site, group, gpus[:index].count(group.gpu)) for index, group in enumerate(groups)]
    return site.model_copy(update={"nodes": tuple(entries)})


def _entry(site: SiteFile, group: NodeGroup, earlier: int) -> NodeEntry:
    """Return the entry of equal nodes; `earlier` other kinds of node with the same GPU have entries already."""
    written = next((entry for entry in site.nodes if entry.gpu == group.gpu), None)
    written = written or NodeEntry(name=group.gpu, gpu=group.gpu, gpus=group.gpus)
    # A gateway may be a job of its own: a node whose GPUs take all of its memory would leave it waiting.
    memory_gb = group.memory_gb - GATEWAY_MEMORY_GB
    measured = {
        "name": f"{written.name}.{earlier + 1}" if earlier else written.name,
        "gpus": group.gpus,
        "count": group.count,
        "host_memory_gb": memory_gb if memory_gb > 0 else written.host_memory_gb,
        "gres": group.gres,
    }
    return written.model_copy(update=measured)


def read_scenario(path: Path) -> ScenarioFile:
    """Read a scenario file, with the inventories that its sites name."""
    scenario = read_yaml(path, ScenarioFile)
    return scenario.model_copy(update={"sites": tuple(map(with_measured_nodes, scenario.sites))})


def topology_of(scenario: ScenarioFile) -> Topology:
    """Return the planner's topology; raises UsageError for names and numbers that cannot be."""
    return Topology(
        sites=tuple(site.site() for site in scenario.sites), links=tuple(entry.link() for entry in scenario.links)
    )
