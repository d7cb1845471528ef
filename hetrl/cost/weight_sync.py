"""Seconds and bytes of sending new weights from where they are trained to where they are used."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hetrl.cost import cycle, formulas
from hetrl.cost.model import CostModel
from hetrl.cost.network import Direction, gateway_path, gateways_of, link_delay_ms, link_seconds, uplink_seconds
from hetrl.cost.stages import model_of, stage_shape
from hetrl.hardware import Topology, bytes_per_second
from hetrl.plan.plan import Route, TaskPlan, WeightSync, node_of, nodes_of, site_of, sites_of
from hetrl.workload import TRAINED, has_language_head


@dataclass(frozen=True)
class SyncCost:
    """What a version of one model's weights costs.

    The transfer may be hidden behind other tasks: its parts (`weight_sync_cost`) run at the same time. The pause, in
    which those who use the weights load them, is not hidden behind theirs. `way_seconds` are those of each direction
    between sites alone, `sites` where those are who use the weights.
    """

    encode_seconds: float
    uplink_seconds: float
    fan_out_seconds: float
    pause_seconds: float
    wan_bytes: dict[Direction, float]
    way_seconds: dict[Direction, float]
    sites: frozenset[str]

    @property
    def transfer_seconds(self) -> float:
        """Return the time until the weights are where they are used."""
        return cycle.transfer_seconds(self.encode_seconds, self.uplink_seconds, self.fan_out_seconds)

    @property
    def seconds(self) -> float:
        """Return the whole time from the last optimiser step to the first use of the next version."""
        return self.transfer_seconds + self.pause_seconds


@dataclass(frozen=True)
class Versions:
    """The seconds of a version: from the end of the inferences until the actor is trained, its `transfer` and `pause`;
    from there, too, until the critic's inference has the critic's, and that inference with the scoring that its devices
    do behind it; and those that versions take at least to follow one another: the busiest link, transfers.
    """

    actor: float
    transfer: float = 0.0
    pause: float = 0.0
    critic: float = 0.0
    valuing: float = 0.0
    links: float = 0.0


@dataclass(frozen=True)
class TrainingsAhead:
    """What the next batch's trainings send between sites while a version travels: first scoring, then the steps.

    Seconds from the version's start to the `begins` of both, and how long each `lasts`; each direction is `taken` for
    so many of these. A direction that no training uses has no entry.
    """

    begins: tuple[float, float]
    lasts: tuple[float, float]
    taken: Mapping[Direction, tuple[float, float]]

    def behind(self, way: Direction, alone: float) -> float:
        """Return the time of a transfer that takes `alone` where no training does and gives way to these."""
        if way not in self.taken:
            return alone
        return cycle.yielding_seconds(alone, self.begins, self.lasts, self.taken[way])

    def give_way(self, version: SyncCost) -> SyncCost:
        """Return the cost of a version that gives way to these trainings."""
        ways = (self.behind(way, seconds) for way, seconds in version.way_seconds.items())
        return replace(version, uplink_seconds=max(version.uplink_seconds, *ways, 0.0))


NO_TRAININGS = TrainingsAhead((0.0, 0.0), (0.0, 0.0), {})


def trained_models(tasks: Collection[str]) -> list[str]:
    """Return the models that these tasks train and use: the actor, and the critic of PPO."""
    return [model for model, pair in TRAINED.items() if all(task in tasks for task in pair)]


def weight_routes(tasks: Mapping[str, TaskPlan]) -> WeightSync:
    """Return synchronisation by deltas: the sites of a training's first replica send to all that take its weights.

    A piece of which a delta would be larger goes as it is, so that a full set is never the better choice of bytes.
    """
    routes = []
    for model in trained_models(tasks):
        trains, takes = (tasks[name] for name in TRAINED[model])
        sources = sites_of(stage.devices[0] for stage in trains.replicas[0].stages)
        routes += [Route(a, b, model=model) for a in sources for b in sites_of(takes.devices) if a != b]
    return WeightSync("delta", tuple(routes))


def held_bytes(name: str, training: TaskPlan, model: CostModel) -> dict[str, float]:
    """Return the weight bytes that each node (`site/node`) holds of the first replica of a training."""
    held: defaultdict[str, float] = defaultdict(float)
    for stage, size in zip(training.replicas[0].stages, _stage_bytes(name, training, model), strict=True):
        held[node_of(stage.devices[0])] += size
    return dict(held)


def _stage_bytes(name: str, training: TaskPlan, model: CostModel) -> list[float]:
    """Return the bytes that each stage of the first replica sends, of all its ranks together."""
    replica, workload = training.replicas[0], model.workload
    trained = model_of(name, workload)
    shapes = [
        stage_shape(name, replica, index, model.rates(stage.devices[0]), workload)
        for index, stage in enumerate(replica.stages)
    ]
    sizes = [shape.parameters * shape.tensor_parallel * workload.weight_bytes for shape in shapes]
    if has_language_head(name) and trained.tied_embeddings and len(sizes) > 1:
        sizes[-1] -= trained.head_parameters * workload.weight_bytes  # the copy of the embedding is not sent
    return sizes


# Of the value of one weight that changed, packed, by the weight's bytes (docs/decisions.md; bf16: 2.6 to 3.4).
STEP_BITS = {2: 3.0, 4: 11.4}


def delta_share(changed: float, weight_bytes: int) -> float:
    """Return the bytes of a delta over those of the full set, where the share `changed` of the weights differ.

    The places take their entropy, -p log2 p - (1 - p) log2(1 - p) bits per weight (Shannon 1948, theorem 2), which
    `hetrl.runtime.wire.changes` gets within 5 % of, and each change `STEP_BITS`; never more than the full set.
    """
    rest = 1.0 - changed
    places = -sum(share * math.log2(share) for share in (changed, rest) if share > 0.0)
    return min((places + changed * STEP_BITS[weight_bytes]) / (8 * weight_bytes), 1.0)


def weight_sync_cost(
    sync: WeightSync,
    tasks: Mapping[str, TaskPlan],
    model: CostModel,
    trained: str = "actor",
    changed: float | None = None,
) -> SyncCost:
    """Return the time of one version of a trained model: encode, every uplink once, fan-out inside the sites, load.

    `changed` is the measured share of weights that differ between two versions: a `delta` sends those (`delta_share`).
    Without a measurement a `delta` is priced like the full set, which its first version is.

    encode   the trainer's ranks copy their weights to host memory, all at once
    uplinks  the routes run at the same time; a site's uplink carries all that leave it, and all that arrive
    fan-out  a node that uses the weights receives over its NIC what its own node does not hold, a node with weights
             sends them once into its site and once per route; nodes forward, and the chunks overlap with the uplink
    load     each device takes its share (weights/TP) from host memory, plus the fixed pause of a version
    """
    topology, workload = model.topology, model.workload
    trains, takes = TRAINED[trained]
    training, users = tasks[trains], tasks[takes]
    sizes, held = _stage_bytes(trains, training, model), held_bytes(trains, training, model)
    sent = 1.0
    if sync.encoding == "delta" and changed is not None:
        sent = delta_share(changed, workload.weight_bytes)
    wan: defaultdict[Direction, float] = defaultdict(float)
    routes = [route for route in sync.routes if route.model == trained]
    for route in routes:
        wan[route.source, route.target] += sent * sum(s for n, s in held.items() if site_of(n) == route.source)
    devices = [topology.device_by_id[name] for name in (*training.devices, *users.devices)]
    stages = zip(training.replicas[0].stages, sizes, strict=True)
    encode = max(size / len(stage.devices) / model.rates(stage.devices[0]).host_bytes_per_s for stage, size in stages)
    fan_out = sent * _fan_out_seconds(held, users, routes, topology)
    gateways = gateways_of(topology, devices)
    ways = {way: gateway_path(topology, gateways, way).seconds(load) for way, load in wan.items()}
    uplink = max([*ways.values(), uplink_seconds(gateways, wan)])
    pause = _pause_seconds(users, sum(sizes), model)
    return SyncCost(encode, uplink, fan_out, pause, dict(wan), ways, frozenset(sites_of(users.devices)))


def critic_behind(costs: Mapping[str, SyncCost], topology: Topology, ahead: TrainingsAhead = NO_TRAININGS) -> SyncCost:
    """Return the critic's version as it travels beside the actor's, both from the last optimiser step on.

    Its weights stand still while the actor's, which generation waits for, take a direction between two sites that both
    take, or the network cards of a site that both are used at; all weights give way to the trainings `ahead`.
    """
    actor, critic = costs["actor"], costs["critic"]
    sites, uplink = actor.sites & critic.sites, critic.uplink_seconds
    for way, moved in critic.wan_bytes.items():
        before = link_seconds(topology, way, actor.wan_bytes.get(way, 0.0))
        before = max(before, actor.fan_out_seconds if way[1] in sites else 0.0)
        alone = before + link_delay_ms(topology, way) / 1e3 + link_seconds(topology, way, moved)
        uplink = max(uplink, ahead.behind(way, alone))
    inside = actor.fan_out_seconds if sites else 0.0
    return replace(critic, uplink_seconds=uplink, fan_out_seconds=inside + critic.fan_out_seconds)


def versions_of(
    trained: Versions, syncs: Mapping[str, SyncCost], ahead: TrainingsAhead, links: float, model: CostModel
) -> Versions:
    """Return the seconds of what was trained as a version that gives way to the trainings `ahead`."""
    costs = {name: ahead.give_way(sync) for name, sync in syncs.items()}
    actor = costs["actor"]
    transfer, follow = actor.transfer_seconds, max(links, actor.transfer_seconds)
    versions = replace(trained, transfer=transfer, pause=actor.pause_seconds, links=follow)
    if "critic" not in costs:
        return versions
    critic, behind = costs["critic"], critic_behind(costs, model.topology, ahead).transfer_seconds
    alone, lead = critic.transfer_seconds, trained.critic - trained.actor
    travels = cycle.behind_seconds(alone, behind, lead)
    if model.workload.staleness:
        transfer = cycle.shared_transfer_seconds(transfer, alone, travels, lead)
    arrival = trained.critic + travels + critic.pause_seconds
    return replace(versions, transfer=transfer, critic=arrival, links=max(follow, travels))


def _fan_out_seconds(held: Mapping[str, float], users: TaskPlan, routes: Sequence[Route], topology: Topology) -> float:
    """Return the slowest NIC, of nodes that use weights and of nodes that hold them (`formulas.interface_bytes`)."""
    total, times = sum(held.values()), [0.0]
    nodes = nodes_of(users.devices)
    for node in dict.fromkeys((*nodes, *held)):
        nic = bytes_per_second(topology.node_by_id[node].nic_gbps)
        copies = sum(route.source == site_of(node) for route in routes)
        copies += any(site_of(other) == site_of(node) for other in nodes if other != node)
        times.append(formulas.interface_bytes(total, held.get(node, 0.0), node in nodes, copies) / nic)
    return max(times)


def _pause_seconds(users: TaskPlan, total: float, model: CostModel) -> float:
    """Return the longest pause of a replica: its largest share from host memory, plus the fixed time."""
    replicas = ((model.rates(one.devices[0]), total / len(one.devices)) for one in users.replicas)
    return max(share / rates.host_bytes_per_s + rates.overhead.weight_version for rates, share in replicas)
