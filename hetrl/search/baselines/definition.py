"""What systems for equal GPUs are taken to do on unequal ones, where their publications leave it open."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetrl.hardware import Topology
from hetrl.problem import Problem

EQUAL, BY_SPEED = "equal", "by-speed"


@dataclass(frozen=True)
class Definition:
    """One reading of `verl` and `streamrl`; without arguments, that of the solvers of these names.

    `shares`: every replica gets the same samples (`equal`), or as many as it has time for (`by-speed`).
    `sees_links`: StreamRL divides the GPUs by what its stages take over the links that there are, or in one place.
    `critic_apart`: critic and reward model may have one half of the GPUs for themselves, as in verl's example of split
    placement (github.com/volcengine/verl, examples/split_placement); the faster placement counts.
    `chosen_hosts`: StreamRL has one of the sets of hosts that `verl-expert` tries, in its order.
    """

    shares: str = EQUAL
    sees_links: bool = True
    critic_apart: bool = False
    chosen_hosts: bool = False


AS_SOLVED = Definition()


def in_one_place(problem: Problem) -> Problem:
    """Return the problem with every link as fast as the network cards of its sites."""
    topology = problem.topology
    sites = tuple(
        replace(site, nodes=tuple(replace(node, wan_gbps=None) for node in site.nodes)) for site in topology.sites
    )
    gbps = {site.name: sum(node.nic_gbps for node in site.nodes) for site in sites}
    delay_ms = {site.name: site.delay_ms for site in sites}
    links = tuple(
        replace(
            link,
            gbps=min(gbps[site] for site in link.between),
            delay_ms=max(delay_ms[site] for site in link.between),
        )
        for link in topology.links
        if link.gbps > 0
    )
    return replace(problem, topology=Topology(sites, links))
