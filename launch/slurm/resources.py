"""What a job asks of Slurm: the options of sbatch(1) for equal nodes of one site. Pure functions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from hetrl.describe.inventory import Inventory, NodeGroup, node_groups
from hetrl.describe.sites import GATEWAY_MEMORY_GB, NodeEntry, SiteFile
from hetrl.errors import UsageError
from hetrl.gpus import is_cpu
from hetrl.hardware import Node

# How long before its end Slurm tells a job: some iterations, since the step under way and its checkpoint must fit in,
# and no more than sbatch(1) takes (--signal).
NOTICE_SECONDS, NOTICE_ITERATIONS, MOST_NOTICE_SECONDS = 300, 2.5, 65535
MAX_ARRAY_SIZE = 1001  # of a cluster whose inventory is not known: Slurm's default (slurm.conf(5), MaxArraySize)


@dataclass(frozen=True)
class Shape:
    """What a job takes of each of its nodes; equal shapes can stand in one component or array.

    `devices` is how many GPUs (or `cpu` devices) Slurm is asked for: all of the node where the site hands out whole
    nodes. None at all: the gateway alone. `gres` is Slurm's type of the GPUs, None where only the site's file maps it.
    """

    gpu: str | None = None
    devices: int = 0
    memory_gb: float | None = GATEWAY_MEMORY_GB  # None: all of the node
    whole: bool = False
    gres: str | None = None

    @property
    def gpus(self) -> int:
        """Return the GPUs that are charged on each node: those that Slurm hands out, whatever they stand for here."""
        return 0 if self.gpu is None or (is_cpu(self.gpu) and self.gres is None) else self.devices

    def spoken(self, nodes: int) -> str:
        """Return so many nodes in words: `nodes with 4 a100-80gb each`."""
        if self.gpu is None:
            return "core"
        what = f"{self.devices} {'CPU cores' if is_cpu(self.gpu) else self.gpu}"
        kind = "whole node" if self.whole else "node"
        return f"{kind} with {what}" if nodes == 1 else f"{kind}s with {what} each"


GATEWAY_SHAPE = Shape()


def shape_of(site: SiteFile, node: Node, used: int) -> Shape:
    """Return what a job that uses so many devices of a node asks for."""
    gres = next((entry.gres for entry in site.nodes if node.name in entry.node_names), None)
    if is_cpu(node.gpu):
        gres = gres or next((name for name, gpu in site.gres.items() if gpu == node.gpu), None)
    if site.allocation == "node":
        return Shape(node.gpu, node.gpus, None, whole=True, gres=gres)
    return Shape(node.gpu, used, node.host_memory_gb * used / node.gpus, gres=gres)


def node_kinds(site: SiteFile) -> tuple[NodeEntry, ...]:
    """Return one kind of node per GPU type, the first that the site's file has."""
    return tuple({entry.gpu: entry for entry in reversed(site.nodes)}.values())[::-1]


def notice_seconds(iteration_seconds: float, walltime_seconds: int) -> int:
    """Return how long before its end Slurm tells a job."""
    wanted = math.ceil(NOTICE_ITERATIONS * min(iteration_seconds, MOST_NOTICE_SECONDS))
    return min(max(NOTICE_SECONDS, wanted), walltime_seconds // 2, MOST_NOTICE_SECONDS)


def max_array_size(inventory: Inventory | None) -> int:
    """Return how many tasks an array may have; the highest index must stay below MaxArraySize."""
    return inventory.max_array_size if inventory is not None else MAX_ARRAY_SIZE


def resource_options(
    site: SiteFile, shape: Shape, nodes: int, walltime: str, inventory: Inventory | None = None
) -> tuple[str, ...]:
    """Return the options for so many nodes of a shape."""
    group = _group_of(site, shape, inventory)
    options = [f"--nodes={nodes}", f"--time={walltime}"]
    options += [f"--clusters={site.cluster}"] if site.cluster else []
    options += [f"--{key}={value}" for key in ("account", "qos") if (value := getattr(site, key))]
    gateway_alone = site.gateway_sbatch if shape.gpu is None else ()
    named = any(option.startswith("--partition=") for option in gateway_alone)
    if (partitions := _partitions(site, shape, inventory)) and not named:
        options.append(f"--partition={','.join(partitions)}")
    if shape.whole:
        options += ["--exclusive", "--mem=0"]  # 0: all memory of the node (sbatch(1))
    else:
        # Slurm's M are MiB; rounded up, the shares of all of a node's GPUs might not fit into it.
        memory_mib = math.floor((shape.memory_gb or GATEWAY_MEMORY_GB) * 1e9 / 2**20)
        options += [f"--cpus-per-task={_cpus(site, shape)}", f"--mem={memory_mib}M"]
    gres, feature = _gres(site, shape, group)
    if gres is not None and site.gpu_request != "none":
        per_node = f"--gpus-per-node={gres.removeprefix('gpu:')}"
        options.append(per_node if site.gpu_request == "gpus-per-node" else f"--gres={gres}")
    added = (*site.sbatch, *gateway_alone)
    if feature is not None:  # the last one counts to sbatch: both in one
        theirs = [option.partition("=")[2] for option in added if option.startswith("--constraint=")]
        options.append("--constraint=" + "&".join([feature, *(f"({one})" for one in theirs)]))
        added = tuple(option for option in added if not option.startswith("--constraint="))
    return (*options, *added)


def unmanaged_gpus(site: SiteFile, shapes: Iterable[Shape]) -> str:
    """Return the GPUs of the largest of these nodes, as CUDA_VISIBLE_DEVICES has them, where Slurm knows of none."""
    most = max(shape.gpus for shape in shapes)
    return ",".join(map(str, range(most))) if site.gpu_request == "none" else ""


def sbatch_lines(options: Iterable[str]) -> str:
    """Return options as lines of a script."""
    parts = (option.partition("=") for option in options)
    return "\n".join(f"#SBATCH {name}{sign}{shlex.quote(value) if sign else ''}" for name, sign, value in parts)


def _cpus(site: SiteFile, shape: Shape) -> int:
    """Return the CPUs per node: a `cpu` device is one core's share of a machine."""
    if shape.gpu is None:
        return 1
    return shape.devices * (1 if is_cpu(shape.gpu) else site.cpus_per_gpu)


def _gres(site: SiteFile, shape: Shape, group: NodeGroup | None) -> tuple[str | None, str | None]:
    """Return `gpu:TYPE:N`, and the feature that tells the GPU's type where Slurm's GRES has no type.

    Without an inventory, a name in the site's `gres` is taken for a type.
    """
    names = [name for name, gpu in site.gres.items() if gpu == shape.gpu]
    if shape.gres in names:
        names = [shape.gres]
    if shape.gpu is None or (is_cpu(shape.gpu) and not names):
        return None, None
    if group is None:
        return ":".join(["gpu", *names[:1], str(shape.devices)]), None
    gres = ":".join(["gpu", *filter(None, [group.gres]), str(shape.devices)])
    return gres, None if group.gres in names else next(iter(names), None)


def _group_of(site: SiteFile, shape: Shape, inventory: Inventory | None) -> NodeGroup | None:
    """Return the nodes of the cluster that a shape fits on; raises UsageError where there are none."""
    if inventory is None or shape.gpu is None or is_cpu(shape.gpu) or site.gpu_request == "none":
        return None
    groups = node_groups(inventory, site.gres, site.partitions)
    for group in sorted(groups, key=lambda group: group.gpus):
        if _is_of(group, shape) and (group.gpus == shape.devices if shape.whole else group.gpus >= shape.devices):
            return group
    raise UsageError(
        f"{site.name}: no node in service has {shape.devices} x {shape.gpu}; run `hetrl discover`, correct `nodes` in "
        "the site's file, and plan again"
    )


def _partitions(site: SiteFile, shape: Shape, inventory: Inventory | None) -> tuple[str, ...]:
    """Return the partitions to ask for: of those in the site's file, the ones that have such nodes."""
    if inventory is None or shape.gpu is None:
        return site.partitions
    return tuple(name for name in site.partitions if _has(inventory, site, name, shape)) or site.partitions


def _has(inventory: Inventory, site: SiteFile, partition: str, shape: Shape) -> bool:
    groups = node_groups(inventory, site.gres, (partition,))
    return any(_is_of(group, shape) and group.gpus >= shape.devices for group in groups)


def _is_of(group: NodeGroup, shape: Shape) -> bool:
    return group.gpu == shape.gpu and shape.gres in (None, group.gres)
