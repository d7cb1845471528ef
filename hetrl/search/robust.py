"""Whether a training should cross sites: only where that is worth it at the measured links and at worse ones.

the best plan of all, and the best whose trainings each stay in one site    (`Space.home`)
value of both at the links as they are, and where each gives `share` less
the first is taken where it gains `LEAST_GAIN` or more both times, else the second
"""

from __future__ import annotations

from dataclasses import replace

from hetrl.cost.iteration import with_prediction
from hetrl.cost.objective import plan_value
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan, sites_of
from hetrl.problem import Problem
from hetrl.search.space import Space
from hetrl.workload import TRAININGS

LEAST_GAIN = 0.05  # of what crosses: each link is one more thing that may fail in every optimiser step
HOME_SHARE = 1 / 3  # of the time of a search, for plans that do not cross


def may_cross(space: Space) -> bool:
    """Return whether any training could span two linked sites."""
    topology = space.problem.topology
    trains = {
        space.classes[kind].site
        for task in space.problem.workload.tasks
        if task in TRAININGS
        for kind in range(len(space.classes))
        if space.usable(task, kind)
    }
    return any({*link.between} <= trains for link in topology.links)


def crosses(plan: Plan) -> bool:
    """Return whether a training of the plan spans sites."""
    return any(len(sites_of(task.devices)) > 1 for name, task in plan.tasks.items() if name in TRAININGS)


def with_worse_links(topology: Topology, share: float) -> Topology:
    """Return the topology where every link gives so much less of its bandwidth."""
    return replace(topology, links=tuple(replace(link, gbps=(1 - share) * link.gbps) for link in topology.links))


def chosen(anywhere: Plan, home: Plan, problem: Problem, share: float) -> Plan:
    """Return the plan to take, of the best of all and the best that stays at home, with their predictions."""
    if not crosses(anywhere):
        return min(anywhere, home, key=lambda plan: plan_value(plan, problem.topology, problem.objective))
    return anywhere if least_gain(anywhere, home, problem, share) >= LEAST_GAIN else home


def least_gain(plan: Plan, other: Plan, problem: Problem, share: float) -> float:
    """Return by what share a plan beats another one, the less of that at the links as they are and at worse ones."""
    topologies = problem.topology, with_worse_links(problem.topology, share)
    return min(_gain(plan, other, replace(problem, topology=topology)) for topology in topologies)


def _gain(plan: Plan, other: Plan, problem: Problem) -> float:
    value, without = (
        plan_value(with_prediction(one, problem.model), problem.topology, problem.objective) for one in (plan, other)
    )
    return without / value - 1
