"""What the hops of pipelines get of the wires that they share: the nodes' network cards, uplinks, links between sites.

    flows of a pass on a wire: all hops that send over it; a step sends activations there and gradients back
    gbps of a hop: the least of link / its flows, uplink / those of its node, card / those of its node, at either end

On a link the flow of a replica that has n_j samples disturbs one that has n_i for min(n_j, n_i) of them, so it counts
as min(1, n_j / n_i): equal shares of a link, as long as a flow has something to send. Nodes of one class count as the
busiest of them. What is slower elsewhere leaves the rest to others (max-min fairness), which is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetrl.cost.network import Direction
from hetrl.cost.stages import Placed
from hetrl.hardware import Path, Topology


@dataclass(frozen=True)
class Flows:
    """How many hops send from and to the busiest node of each class at the same time."""

    sending: Mapping[int, int]
    receiving: Mapping[int, int]

    def least_gbps(self, source: tuple[int, float], target: tuple[int, float]) -> float:
        """Return what a hop gets between two nodes, given the class of each and the rate of its wire."""
        return min(source[1] / self.sending[source[0]], target[1] / self.receiving[target[0]])


@dataclass(frozen=True)
class Hops:
    """The flows of one pass on links, uplinks and network cards."""

    topology: Topology
    links: Mapping[Direction, Mapping[int, int]]  # how many hops of replicas with so many samples
    uplinks: Flows
    cards: Flows
    sharing: Mapping[Direction, int]  # how many tasks use a link at the same time

    def shared(self, placed: Sequence[Placed], samples: int) -> tuple[Placed, ...]:
        """Return the stages of a replica with so many samples, each with what its hop gets."""
        found = [replace(stage, hop=self._path(stage, following, samples)) for stage, following in pairwise(placed)]
        return (*found, placed[-1])

    def _path(self, stage: Placed, following: Placed, samples: int) -> Path | None:
        ends = [one.devices[0].node_id for one in (stage, following)]
        if stage.hop is None or ends[0] == ends[1] or not self.topology.linked(stage.site, following.site):
            return stage.hop
        nodes = [(self.topology.node_class[end], self.topology.node_by_id[end]) for end in ends]
        source, target = ((one, node.nic_gbps) for one, node in nodes)
        gbps = min(stage.hop.gbps, self.cards.least_gbps(source, target))
        if link := self.topology.link(stage.site, following.site):
            direction = stage.site, following.site
            flows = sum(count * min(1.0, size / samples) for size, count in self.links[direction].items())
            source, target = ((one, node.uplink_gbps) for one, node in nodes)
            shared = link.gbps / (flows * self.sharing.get(direction, 1))
            gbps = min(gbps, shared, self.uplinks.least_gbps(source, target))
        return Path(stage.hop.delay_ms, gbps)


def hops_of(
    replicas: Sequence[Sequence[Placed]],
    samples: Sequence[int],
    topology: Topology,
    sharing: Mapping[Direction, int],
    back: bool,
) -> Hops:
    """Count the hops between nodes of a pass over replicas with so many samples each; `back`: gradients return."""
    links: defaultdict[Direction, Counter[int]] = defaultdict(Counter)
    far: list[tuple[str, str]] = []
    near: list[tuple[str, str]] = []
    for placed, size in zip(replicas, samples, strict=True):
        for source, target in messages(placed, back):
            ends = source.devices[0].node_id, target.devices[0].node_id
            if source.site != target.site:
                links[source.site, target.site][size] += 1
                far.append(ends)
            elif ends[0] != ends[1]:
                near.append(ends)
    return Hops(topology, links, _busiest(far, topology), _busiest([*far, *near], topology), sharing)


def messages(placed: Sequence[Placed], back: bool) -> Iterator[tuple[Placed, Placed]]:
    """Yield who sends activations to whom in a pass through a replica, and with `back` their gradients."""
    for stage, following in pairwise(placed):
        yield stage, following
        if back:
            yield following, stage


def _busiest(flows: Sequence[tuple[str, str]], topology: Topology) -> Flows:
    """Return the most flows from and to a node of each class, given the ends of all."""
    found: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for most, ends in zip(found, zip(*flows, strict=True), strict=False):
        for node_id, count in Counter(ends).items():
            own = topology.node_class[node_id]
            most[own] = max(most.get(own, 0), count)
    return Flows(*found)
