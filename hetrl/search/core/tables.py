"""Numbers of the cost model per device class, as arrays that the compiled core reads.

Every number comes from calling `hetrl.cost`, so that the physics stands there alone: what is linear (in layers, tokens,
parameters, micro-batches in flight) is called at two points and kept as coefficients, what is not (generation, forward
passes) is kept as rows over the units of work of one replica (`tables_serving`). Units are seconds, bytes
and GB of 1e9 bytes.

Axes: t task, c device class, s site, k log2 of the tensor-parallel degree, r recompute (none, selective, full), o
option of a serving task (1.., 0 is none), h KV cap (`cache_gb`), i idle state (resident, offload, sleep).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetrl.cost.network import NO_PATH, path
from hetrl.cost.stages import model_of
from hetrl.cost.weight_sync import trained_models
from hetrl.hardware import Node, Path, Topology, wire_seconds
from hetrl.search.core.records import Flags1, Flags2, Floats1, Floats2, Ints1
from hetrl.search.core.tables_objective import ObjectiveTables, objective_tables
from hetrl.search.core.tables_serving import Rows, ServingTables, serving_tables
from hetrl.search.core.tables_training import MAX_STAGES, TrainingTables, training_tables
from hetrl.search.space import Space
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, INFERENCES, TRAINED, TRAININGS

__all__ = ["MAX_STAGES", "Tables", "make_tables"]


class NetworkTables(NamedTuple):
    """What lies between devices, one direction; infinite where there is no link."""

    node_delay: Floats1  # [c] seconds, inside a node
    peer: Floats1  # [c] seconds per byte, GPU to GPU inside a node
    delay: Floats2  # [c, c] seconds, between different nodes of two classes
    byte: Floats2  # [c, c] seconds per byte, likewise
    nic: Floats1  # [c] seconds per byte through a node's network interface
    uplink: Floats1  # [c] seconds per byte from a node out of its site
    link_delay: Floats2  # [s, s] seconds, 0 inside a site
    link_byte: Floats2  # [s, s] seconds per byte of the link alone, 0 inside a site
    linked: Flags2  # [s, s]
    site_delay: Floats1  # [s] seconds, between nodes


class Tables(NamedTuple):
    """All numbers of a problem."""

    tasks: int
    classes: int
    sites: int
    is_training: Flags1  # [t]
    is_inference: Flags1  # [t]
    generation: int  # the task's index
    trainer: int
    trained: Ints1  # [m] the task that trains each model that is trained: the actor, then the critic
    takes: Ints1  # [m] the task that takes its weights
    layers: Ints1  # [t] of the task's model
    site: Ints1  # [c]
    per_node: Ints1  # [c]
    devices: Ints1  # [c]
    usable: Flags2  # [t, c]
    usable_gb: Floats1  # [c]
    node_gb: Floats1  # [c] host memory of a node
    host_byte: Floats1  # [c] seconds per byte between a device and its host
    version_seconds: Floats1  # [c] fixed pause of a weight version
    staleness: int
    kl_in_reward: bool
    home: bool  # whether each training stays in the site of its first class
    narrow: bool  # whether vectors stay inside the plan space of `hetrl.search.ilp.space`
    objective: ObjectiveTables
    network: NetworkTables
    training: TrainingTables
    serving: ServingTables


def make_tables(space: Space, narrow: bool = False) -> tuple[Tables, Rows]:
    """Return the numbers of a problem and the filler of the rows that wait to be asked for.

    `narrow` keeps vectors inside the plan space of the integer program.
    """
    topology, workload = space.problem.topology, space.problem.workload
    serving, rows = serving_tables(space)
    gpus = [space.problem.efficiencies.rates(kind.gpu) for kind in space.classes]
    sites = [site.name for site in topology.sites]
    versions = [TRAINED[name] for name in trained_models(workload.tasks)]
    nodes = [topology.node_by_id[f"{some[0][0].site}/{some[0][0].node}"] for some in space.nodes]
    tables = Tables(
        tasks=len(workload.tasks),
        classes=len(space.classes),
        sites=len(sites),
        is_training=np.array([name in TRAININGS for name in workload.tasks]),
        is_inference=np.array([name in INFERENCES for name in workload.tasks]),
        generation=workload.tasks.index(ACTOR_GENERATION),
        trainer=workload.tasks.index(ACTOR_TRAINING),
        trained=np.array([workload.tasks.index(trains) for trains, _ in versions], np.int64),
        takes=np.array([workload.tasks.index(takes) for _, takes in versions], np.int64),
        layers=np.array([model_of(name, workload).layers for name in workload.tasks], np.int64),
        site=np.array([sites.index(kind.site) for kind in space.classes], np.int64),
        per_node=np.array([kind.gpus_per_node for kind in space.classes], np.int64),
        devices=np.array(space.sizes, np.int64),
        usable=np.array([[space.usable(t, c) for c in range(len(space.classes))] for t in workload.tasks]),
        usable_gb=np.array([gpu.usable_gb for gpu in gpus]),
        node_gb=np.array([node.host_memory_gb for node in nodes], np.float64),
        host_byte=np.array([1 / gpu.host_bytes_per_s for gpu in gpus]),
        version_seconds=np.array([gpu.overhead.weight_version for gpu in gpus]),
        staleness=workload.staleness,
        kl_in_reward=workload.kl_in_reward,
        home=space.home,
        narrow=narrow,
        objective=objective_tables(space),
        network=_network(space, nodes),
        training=training_tables(space),
        serving=serving,
    )
    return tables, rows


def _network(space: Space, nodes: list[Node]) -> NetworkTables:
    topology = space.problem.topology
    names = [site.name for site in topology.sites]
    paths = [[_between_nodes(topology, space, a, b) for b in range(len(nodes))] for a in range(len(nodes))]
    inside = [topology.site_by_name[kind.site] for kind in space.classes]
    links = [[topology.link(a, b) for b in names] for a in names]
    return NetworkTables(
        node_delay=np.array([site.node_delay_ms / 1e3 for site in inside]),
        peer=_per_byte([node.gpu_type.peer_gbps for node in nodes]),
        delay=np.array([[path.delay_ms / 1e3 for path in row] for row in paths]),
        byte=np.array([_per_byte([path.gbps for path in row]) for row in paths]),
        nic=_per_byte([node.nic_gbps for node in nodes]),
        uplink=_per_byte([node.uplink_gbps for node in nodes]),
        link_delay=np.array([[link.delay_ms / 1e3 if link else 0.0 for link in row] for row in links]),
        link_byte=np.array([[_link_byte(topology, a, b) for b in names] for a in names]),
        linked=np.array([[topology.linked(a, b) for b in names] for a in names]),
        site_delay=np.array([site.delay_ms / 1e3 for site in topology.sites]),
    )


def _between_nodes(topology: Topology, space: Space, kind: int, other: int) -> Path:
    """Return the path between different nodes of two classes; a class of one node needs none to itself."""
    source, target = space.nodes[kind][0][0], space.nodes[other][-1][0]
    return NO_PATH if source == target else path(topology, source, target)


def _link_byte(topology: Topology, site: str, other: str) -> float:
    link = topology.link(site, other)
    if site == other:
        return 0.0
    return wire_seconds(1, link.gbps if link and link.gbps > 0 else NO_PATH.gbps)


def _per_byte(gbps: list[float]) -> Floats1:
    return 8 / (np.array(gbps) * 1e9)
