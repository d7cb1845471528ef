"""How a plan stands where a link between its sites gives less than was measured: each alone, and all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetrl.cost.iteration import predict
from hetrl.describe.experiment import Planner
from hetrl.explanation.resources import used_links
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search.robust import with_worse_links

ALL = "all links"


@dataclass(frozen=True)
class WorseLink:
    """The iteration where a link (`a–b`, or `ALL`) gives the share `less` less."""

    link: str
    less: float
    seconds: float


def worse_links(plan: Plan, problem: Problem) -> tuple[WorseLink, ...]:
    """Return the links that the plan sends over, the one that costs most first, and all of them where they are several.

    The share is `planner.robust`, its default where that is 0 or the problem was made in code.
    """
    less = problem.planner.robust or Planner().robust
    found = []
    for name, topology in _worse(plan, problem.topology, less):
        predicted = predict(plan, replace(problem, topology=topology).model)
        found.append(WorseLink(name, less, predicted.iteration_seconds))
    return tuple(sorted(found, key=lambda one: (one.link == ALL, -one.seconds)))


def _worse(plan: Plan, topology: Topology, less: float) -> Iterator[tuple[str, Topology]]:
    """Yield each changed topology."""
    used = [*used_links(plan, topology)]
    for link in used:
        links = tuple(replace(one, gbps=(1 - less) * one.gbps) if one is link else one for one in topology.links)
        yield f"{link.between[0]}–{link.between[1]}", replace(topology, links=links)
    if len(used) > 1:
        yield ALL, with_worse_links(topology, less)
