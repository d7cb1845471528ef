"""What the hops of pipelines between sites get of the wires that they share: links, and the uplinks of nodes.

    flows of a pass on a wire: all hops that send over it; a step sends activations there and gradients back
    gbps of a hop: the least of link / its flows, uplink / those of its node, at either end

On a link the flow of a replica that has n_j samples disturbs one that has n_i for min(n_j, n_i) of them, so it counts
as min(1, n_j / n_i): equal shares of a link, as long as a flow has something to send. Nodes of one kind count as the
busiest of them. What is slower elsewhere leaves the rest to others (max-min fairness), which is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hetrl.cost.network import Direction
from hetrl.cost.stages import Placed
from hetrl.hardware import Node, Path, Topology


@dataclass(frozen=True)
class Hops:
    """How many hops of one pass use each link, and send from and to the busiest node of each kind, at the same time."""

    topology: Topology
    links: Mapping[Direction, Mapping[int, int]]  # how many hops of replicas with so many samples
    sending: Mapping[Hashable, int]
    receiving: Mapping[Hashable, int]
    sharing: Mapping[Direction, int]  # how many tasks use a link at the same time

    def shared(self, placed: Sequence[Placed], samples: int) -> tuple[Placed, ...]:
        """Return the stages of a replica with so many samples, each with what its hop gets."""
        found = [replace(stage, hop=self._path(stage, following, samples)) for stage, following in pairwise(placed)]
        return (*found, placed[-1])

    def _path(self, stage: Placed, following: Placed, samples: int) -> Path | None:
        link = self.topology.link(stage.site, following.site)
        if stage.hop is None or link is None or not self.topology.linked(stage.site, following.site):
            return stage.hop
        direction = stage.site, following.site
        flows = sum(count * min(1.0, size / samples) for size, count in self.links[direction].items())
        source, target = (self.topology.node_by_id[one.devices[0].node_id] for one in (stage, following))
        shares = (
            link.gbps / (flows * self.sharing.get(direction, 1)),
            source.uplink_gbps / self.sending[_kind(stage.site, source)],
            target.uplink_gbps / self.receiving[_kind(following.site, target)],
        )
        return Path(stage.hop.delay_ms, min(shares))


def hops_of(
    replicas: Sequence[Sequence[Placed]],
    samples: Sequence[int],
    topology: Topology,
    sharing: Mapping[Direction, int],
    back: bool,
) -> Hops:
    """Count the hops between sites of a pass over replicas with so many samples each; `back`: gradients return."""
    links: defaultdict[Direction, Counter[int]] = defaultdict(Counter)
    sending: Counter[str] = Counter()
    receiving: Counter[str] = Counter()
    for placed, size in zip(replicas, samples, strict=True):
        for stage, following in pairwise(placed):
            if stage.site == following.site:
                continue
            for source, target in ((stage, following), (following, stage))[: 2 if back else 1]:
                links[source.site, target.site][size] += 1
                sending[source.devices[0].node_id] += 1
                receiving[target.devices[0].node_id] += 1
    return Hops(topology, links, _busiest(sending, topology), _busiest(receiving, topology), sharing)


def _kind(site: str, node: Node) -> Hashable:
    return site, replace(node, name="")  # all of a node but its name, as in `hetrl.search.space`


def _busiest(flows: Mapping[str, int], topology: Topology) -> dict[Hashable, int]:
    """Return the most flows of a node of each kind."""
    found: dict[Hashable, int] = {}
    for node_id, count in flows.items():
        kind = _kind(node_id.partition("/")[0], topology.node_by_id[node_id])
        found[kind] = max(found.get(kind, 0), count)
    return found
