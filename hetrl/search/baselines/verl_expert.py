"""verl in the hands of a careful user: chooses and orders the nodes, then tunes; colocated and uniform all the same.

    node sets: the fastest GPU type, the two fastest, ... x the sites nearest to each site: it alone, with one more, ...
      each set in order: from site to nearest site, the fastest nodes of a site first
    plain trials of every set (micro-batch 1), then all trials of the few best sets:
      those of `verl`, and also: stages or replicas on neighbouring nodes, the optimiser sharded or not
    the fastest is the plan

What verl can be told by configuration is tuned: which hosts, in which order, and every degree. What it cannot do stays
out: unequal layers or samples, roles on different hosts, another TP for each kind of GPU. Source: as for `verl`
(HybridFlow, arXiv 2409.19256); leaving slow GPUs out is what HetRL (arXiv 2512.12476) compares with when it sets 24
A100 against all 64 GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from hetrl.errors import InfeasibleError
from hetrl.hardware import Topology
from hetrl.plan.plan import SHARDINGS, Plan
from hetrl.problem import Problem
from hetrl.search.assemble import Made
from hetrl.search.baselines.uniform import Nodes, Trials, Tuned, listed_nodes, tuned
from hetrl.search.space import Space

TUNING = (
    "the fastest of all uniform layouts on a chosen set of hosts (slow GPU types and far sites left out or not), "
    "ordered by site and speed: TP, PP, DP, rank order, micro-batch, recomputation, sharding, offloading, rollouts' TP"
)
PLAIN = Trials(orders=("stages", "replicas"), micro_batches=(1,), shardings=SHARDINGS, kept=1)
WHOLE = Trials(orders=("stages", "replicas"), shardings=SHARDINGS)
TUNED_SETS = 6  # that were the best in the plain trials


def plan(space: Space, budget_seconds: float, made: Made) -> tuple[Plan, int]:
    """Return the expert's plan and the number of layouts compared; raises InfeasibleError where none fits."""
    deadline = time.monotonic() + budget_seconds
    ranked: list[tuple[float, dict[str, Nodes]]] = []
    best, compared = Tuned(None, 0), 0
    for nodes in node_sets(space.problem, listed_nodes(space.problem)):
        found = tuned(space.problem, nodes, made, PLAIN, deadline)
        compared += found.compared
        ranked.append((found.seconds, nodes))
        best = min(best, found, key=lambda one: one.seconds)
        if best.plan and time.monotonic() > deadline:
            break
    for _, nodes in sorted(ranked, key=lambda entry: entry[0])[:TUNED_SETS]:
        if best.plan and time.monotonic() > deadline:
            break
        found = tuned(space.problem, nodes, made, WHOLE, deadline)
        compared += found.compared
        best = min(best, found, key=lambda one: one.seconds)
    if best.plan is None:
        raise InfeasibleError(
            "verl-expert: no uniform layout of all tasks fits on any set of hosts together; use planner.solver sha-ea"
        )
    return best.plan, compared


def node_sets(problem: Problem, listed: Mapping[str, Nodes]) -> Iterator[dict[str, Nodes]]:
    """Yield the sets of nodes worth a trial, each once, in order: the whole first, then ever fewer GPU types."""
    gpus = sorted(
        {node[0].gpu for nodes in listed.values() for node in nodes},
        key=lambda gpu: (-problem.efficiencies.rates(gpu).training_flops, gpu),
    )
    sites = list(dict.fromkeys(node[0].site for nodes in listed.values() for node in nodes))
    seen = set()
    for kept_types in range(len(gpus), 0, -1):
        for anchor in sites:
            order = nearest_first(problem.topology, anchor, sites)
            for kept_sites in range(len(order), 0, -1):
                chosen = {name: _chosen(nodes, order[:kept_sites], gpus[:kept_types]) for name, nodes in listed.items()}
                key = frozenset((name, node) for name, nodes in chosen.items() for node in nodes)
                if key not in seen and all(chosen.values()):
                    seen.add(key)
                    yield chosen


def nearest_first(topology: Topology, anchor: str, sites: list[str]) -> list[str]:
    """Return the sites from `anchor` on, each followed by the one with the fastest link to it of those left."""
    order = [anchor]
    while len(order) < len(sites):
        left = [site for site in sites if site not in order]
        order.append(max(left, key=lambda site: _gbps(topology, order[-1], site)))
    return order


def _gbps(topology: Topology, site: str, other: str) -> float:
    link = topology.link(site, other)
    return link.gbps if link else 0.0


def _chosen(nodes: Nodes, sites: list[str], gpus: list[str]) -> Nodes:
    kept = [node for node in nodes if node[0].site in sites and node[0].gpu in gpus]
    return tuple(sorted(kept, key=lambda node: (sites.index(node[0].site), gpus.index(node[0].gpu))))
