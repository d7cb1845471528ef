"""verl as its users run it: all tasks colocated on all GPUs, one uniform layout, blind to differences between them.

    nodes in the listed order; ranks in Megatron's order: TP fastest, then DP, then PP
    tune by trial: TP, PP, DP, micro-batch, recomputation, offloading, the rollouts' TP
      the optimiser is sharded over DP; every replica gets the same samples, every stage the same layers
      each trial is valued by the cost model, as a user values it by a run
    the fastest is the plan

Source: verl (HybridFlow, arXiv 2409.19256): the colocated placement, where one resource pool holds every role; its
Megatron workers shard the optimiser over DP and its examples and tuning guide name the knobs above. Ray sorts the
nodes by address, so the nodes of a site are neighbours, but nothing in verl looks at what a node or a link can do.
docs/baselines.md says why the layout is tuned instead of the first that fits.
"""

from __future__ import annotations

import time

from hetrl.errors import InfeasibleError
from hetrl.plan.plan import Plan
from hetrl.search.assemble import Made
from hetrl.search.baselines.definition import AS_SOLVED, Definition
from hetrl.search.baselines.uniform import Trials, Tuned, critic_apart, listed_nodes, tuned
from hetrl.search.space import Space

TUNING = (
    "the fastest of all uniform layouts on all GPUs in the listed order: TP, PP, DP, micro-batch, recomputation, "
    "offloading, the rollouts' TP"
)


def plan(space: Space, budget_seconds: float, made: Made, definition: Definition = AS_SOLVED) -> tuple[Plan, int]:
    """Return verl's plan and the number of layouts compared; raises InfeasibleError where none fits."""
    deadline, listed = time.monotonic() + budget_seconds, listed_nodes(space.problem)
    placements = [listed, critic_apart(listed, listed) if definition.critic_apart else None]
    best, compared = Tuned(None, 0), 0
    for nodes in filter(None, placements):
        found = tuned(space.problem, nodes, made, Trials(shares=definition.shares), deadline)
        compared += found.compared
        best = min(best, found, key=lambda one: one.seconds)
    if best.plan is None:
        raise InfeasibleError(
            "verl: no uniform layout of all tasks fits on the GPUs together; the smallest GPU decides for all. "
            "Use planner.solver sha-ea, or leave the sites with the smallest GPUs out"
        )
    return best.plan, compared
