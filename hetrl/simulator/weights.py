"""A version of the weights on its way: encoded on the trainer, over the uplinks, from node to node, loaded.

each node that holds weights of the first replica copies them to host memory, in chunks
each chunk, once copied: to the nodes of each site that use the weights, from node to node (over a link once per site)
a replica that has everything loads it: rollouts between two decode steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetrl.cost.network import by_site
from hetrl.cost.weight_sync import held_bytes
from hetrl.hardware import Device
from hetrl.plan.plan import Plan
from hetrl.simulator.events import Process
from hetrl.simulator.pipelines import Setting
from hetrl.simulator.wires import Channel, gateway
from hetrl.workload import TRAINED, versions_ahead

CHUNKS = 16  # of what a node holds: enough that copying, sending and forwarding overlap


@dataclass(frozen=True)
class _Source:
    """A node with weights: the bytes that its devices copy out at once, and the ways that they take."""

    devices: tuple[Device, ...]
    size: float
    chains: tuple[tuple[Channel, ...], ...]  # one per rollout site: from here to its first node, and on to the next


class WeightSync:
    """Sends the versions of a trained model, one after another."""

    def __init__(self, setting: Setting, plan: Plan, trained: str) -> None:
        """Lay out the ways of a plan: the routes between sites, and inside a site every node."""
        self._setting = setting
        self._rank = 1 + len(versions_ahead(trained, setting.model.workload.staleness))  # behind the trainings
        trains, self._takes = TRAINED[trained][0], plan.tasks[TRAINED[trained][1]]
        training = plan.tasks[trains]
        self._held = held_bytes(trains, training, setting.model)
        devices = setting.model.topology.device_by_id
        trainer = [devices[name] for name in training.replicas[0].devices]
        ends = by_site(devices[name] for name in (*training.devices, *self._takes.devices))
        self._gateways = {site: gateway(setting.model.topology, those) for site, those in ends.items()}
        users: dict[str, dict[str, Device]] = {}
        for name in self._takes.devices:
            users.setdefault(devices[name].site, {}).setdefault(devices[name].node, devices[name])
        allowed = {(one.source, one.target) for one in plan.weight_sync.routes if one.model == trained}
        self._sources = []
        for index, (node, size) in enumerate(self._held.items()):
            members = tuple(device for device in trainer if device.node_id == node)
            here = members[0].site
            targets = [list(nodes.values()) for s, nodes in users.items() if s == here or (here, s) in allowed]
            chains = tuple(self._chain(members[0], _turned(nodes, members[0], index)) for nodes in targets)
            self._sources.append(_Source(members, size, chains))

    def _chain(self, source: Device, nodes: Sequence[Device]) -> tuple[Channel, ...]:
        """Return the ways from a node to all of a site's nodes that use the weights, each forwarding to the next."""
        nodes = [node for node in nodes if (node.site, node.node) != (source.site, source.node)]
        if not nodes:
            return ()
        way = [source]
        if nodes[0].site != source.site:
            way += [self._gateways[source.site], self._gateways[nodes[0].site]]
        ordered = {device.node_id: device for device in (*way, *nodes)}.values()
        return tuple(Channel(self._setting.network, a, b, "weights", self._rank) for a, b in pairwise(ordered))

    def transfer(self) -> Process:
        """Bring one version to the host memory of every node that uses it."""
        clock = self._setting.clock
        yield from [clock.start(self._copy(source)) for source in self._sources]

    def _copy(self, source: _Source) -> Process:
        clock, chunk = self._setting.clock, source.size / CHUNKS
        slowest = min(self._setting.model.rates(device.id).host_bytes_per_s for device in source.devices)
        seconds = chunk / len(source.devices) / slowest
        arrived = []
        for _ in range(CHUNKS):
            yield seconds
            arrived += [clock.start(_forward(chain, chunk)) for chain in source.chains]
        yield from arrived

    def load_seconds(self) -> list[float]:
        """Return the pause of each replica for one version: its ranks' shares from host memory, and the fixed time."""
        gpus = [self._setting.model.rates(replica.devices[0]) for replica in self._takes.replicas]
        shares = [sum(self._held.values()) / len(replica.devices) for replica in self._takes.replicas]
        pairs = zip(gpus, shares, strict=True)
        return [share / gpu.host_bytes_per_s + gpu.overhead.weight_version for gpu, share in pairs]


def _turned(nodes: list[Device], source: Device, index: int) -> list[Device]:
    """Let the chain of each source begin at another node, behind its own: all of them forward alike."""
    own = [place for place, node in enumerate(nodes) if (node.site, node.node) == (source.site, source.node)]
    start = (own[0] + 1 if own else index) % len(nodes)
    return nodes[start:] + nodes[:start]


def _forward(chain: Sequence[Channel], size: float) -> Process:
    for channel in chain:
        yield channel.send(size)
