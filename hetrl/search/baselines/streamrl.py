"""StreamRL: generation and training on disjoint GPUs, each uniform, divided so that both stages take the same time.

    orders of the nodes: as listed | the reverse | most FLOPs per byte of memory bandwidth first | most FLOPs first
      the trainer takes the first nodes, the stream generation service the rest; for each place of the cut
        tune both stages (uniform: TP, PP, DP, micro-batch, recomputation; the rollouts' TP)
      the allocation rule keeps the cut with the least max(seconds of generation, seconds of training)
    the fastest order is the plan

The inferences (reference, reward, critic) run with training, one after the other. Source: StreamRL (arXiv 2504.15930):
the trainer and the stream generation service as two stages that overlap under one-step asynchrony, the profiler-based
allocation that balances them, and hardware chosen per stage, compute for training and memory bandwidth for generation.
Its two stages may lie in two datacentres; nothing in it looks at links or at different GPUs inside a stage. What the
length ranker gains on long-tailed lengths is not modelled; with fixed lengths it has nothing to gain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from hetrl.cost.efficiency import Efficiencies, Rates
from hetrl.errors import InfeasibleError
from hetrl.plan.plan import Plan
from hetrl.search.assemble import Made
from hetrl.search.baselines.uniform import Nodes, Trials, Tuned, by_node, listed_nodes, pieces, tuned
from hetrl.search.space import Space
from hetrl.workload import ACTOR_GENERATION, TASKS

TUNING = (
    "generation and training on disjoint GPUs, each the fastest of its uniform layouts; the division that balances "
    "both stages, for four orders of the nodes (as listed, reversed, by FLOPs per byte of bandwidth, by FLOPs)"
)
PLAIN = Trials(micro_batches=(1,), kept=1)
MOST_CUTS = 16  # tried in one order of the nodes, evenly spread


def plan(space: Space, budget_seconds: float, made: Made) -> tuple[Plan, int]:
    """Return StreamRL's plan and the number of layouts compared; raises InfeasibleError where none fits."""
    deadline = time.monotonic() + budget_seconds
    best, compared = Tuned(None, 0), 0
    listed = {name: pieces(nodes) for name, nodes in listed_nodes(space.problem).items()}
    for order in _orders(listed, space.problem.efficiencies):
        balanced, tried = _balanced_cut(space, order, made, deadline)
        compared += tried
        if balanced is None:
            continue
        found = tuned(space.problem, balanced, made, deadline=deadline)
        compared += found.compared
        best = min(best, found, key=lambda one: one.seconds)
        if best.plan and time.monotonic() > deadline:
            break
    if best.plan is None:
        raise InfeasibleError(
            "streamrl: no division of the GPUs gives both generation and training a uniform layout that fits; it needs "
            "at least two GPUs with room for the model each. Use planner.solver sha-ea, or add GPUs"
        )
    return best.plan, compared


def _orders(listed: Mapping[str, Nodes], known: Efficiencies) -> Iterator[dict[str, Nodes]]:
    """Yield the orders, the trainer's end first."""
    yield dict(listed)
    yield {name: own[::-1] for name, own in listed.items()}
    for most in (_intensity, _flops):
        yield {
            name: tuple(sorted(own, key=lambda piece: -most(known.rates(piece[0].gpu)))) for name, own in listed.items()
        }


def _intensity(rates: Rates) -> float:
    return rates.training_flops / rates.decode_bytes


def _flops(rates: Rates) -> float:
    return rates.training_flops


def _balanced_cut(
    space: Space, order: Mapping[str, Nodes], made: Made, deadline: float
) -> tuple[dict[str, Nodes] | None, int]:
    """Return each task's nodes under the cut that balances the stages, and the layouts compared; None: none fits."""
    best: dict[str, Nodes] | None = None
    least, compared = float("inf"), 0
    total = max(map(len, order.values()))
    for cut in range(1, total, max(total // MOST_CUTS, 1)):
        nodes = _divided(order, cut)
        if nodes is None:
            continue
        found = tuned(space.problem, nodes, made, PLAIN, deadline)
        compared += found.compared
        if found.plan and (slower := _slower_stage(found.plan)) < least:
            best, least = nodes, slower
        if best and time.monotonic() > deadline:
            break
    return best, compared


def _divided(order: Mapping[str, Nodes], cut: int) -> dict[str, Nodes] | None:
    """Return the trainer's first `cut` pieces and the others; None where a task gets none.

    Where no site has every engine, the stages use different sites anyway and there is nothing to divide.
    """
    devices = {name: {device for node in nodes for device in node} for name, nodes in order.items()}
    rest = set().union(*(own for name, own in devices.items() if name != ACTOR_GENERATION))
    shared = bool(devices[ACTOR_GENERATION] & rest)
    found = {}
    for name, nodes in order.items():
        own = nodes
        if shared:
            own = nodes[cut:] if name == ACTOR_GENERATION else nodes[:cut]
        found[name] = by_node(device for piece in own for device in piece)
    return found if all(found.values()) else None


def _slower_stage(plan: Plan) -> float:
    times = plan.predicted.tasks
    return max(
        times[ACTOR_GENERATION], sum(times[name] for name in TASKS if name in times and name != ACTOR_GENERATION)
    )
