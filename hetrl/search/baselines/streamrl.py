"""StreamRL: generation and training on disjoint GPUs, each uniform, divided so that both stages take the same time.

    orders of the nodes: as listed | the reverse | most FLOPs per byte of memory bandwidth first | most FLOPs first
      the trainer takes the first nodes, the stream generation service the rest; for each place of the cut
        tune both stages (uniform: TP, PP, DP, micro-batch, recomputation; the rollouts' TP)
      the allocation rule keeps the cut with the least max(seconds of generation, seconds of training)
    the fastest order, of which all layouts are tuned, is the plan

The inferences (reference, reward, critic) run with training, one after the other. Source: StreamRL (arXiv 2504.15930):
the trainer and the stream generation service as two stages that overlap under one-step asynchrony, the profiler-based
allocation that balances them, and hardware chosen per stage, compute for training and memory bandwidth for generation.
Its two stages may lie in two datacentres; nothing in it looks at links or at different GPUs inside a stage. What the
length ranker gains on long-tailed lengths is not modelled; with fixed lengths it has nothing to gain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product

from hetrl.cost.efficiency import Efficiencies, Rates
from hetrl.errors import InfeasibleError
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search.assemble import Made
from hetrl.search.baselines.definition import AS_SOLVED, Definition, in_one_place
from hetrl.search.baselines.uniform import Nodes, Trials, Tuned, by_node, critic_apart, listed_nodes, pieces, tuned
from hetrl.search.baselines.verl_expert import node_sets
from hetrl.search.space import Space
from hetrl.workload import ACTOR_GENERATION

TUNING = (
    "generation and training on disjoint GPUs, each the fastest of its uniform layouts; the division that balances "
    "both stages, for four orders of the nodes (as listed, reversed, by FLOPs per byte of bandwidth, by FLOPs)"
)
PLAIN = Trials(micro_batches=(1,), kept=1)
MOST_CUTS = 16  # tried in one order of the nodes, evenly spread
TUNED_CUTS = 6  # that were the fastest in the plain trials


@dataclass(frozen=True)
class _Cut:
    """Each task's nodes under a cut, and what a plain trial of it takes."""

    nodes: dict[str, Nodes]
    plain: Tuned


def plan(space: Space, budget_seconds: float, made: Made, definition: Definition = AS_SOLVED) -> tuple[Plan, int]:
    """Return StreamRL's plan and the number of layouts compared; raises InfeasibleError where none fits."""
    deadline = time.monotonic() + budget_seconds
    seen = space.problem if definition.sees_links else in_one_place(space.problem)
    cuts, compared = _balanced_cuts(seen, made, definition, deadline)
    best, chosen = Tuned(None, 0), None
    for cut in cuts:
        found = tuned(seen, cut.nodes, made, Trials(shares=definition.shares), deadline)
        compared += found.compared
        if found.seconds < best.seconds:
            best, chosen = found, cut
        if best.plan and time.monotonic() > deadline:
            break
    if chosen and seen is not space.problem:
        best = tuned(space.problem, chosen.nodes, made, Trials(shares=definition.shares), deadline)
    if best.plan is None:
        raise InfeasibleError(
            "streamrl: no division of the GPUs gives both generation and training a uniform layout that fits; it needs "
            "at least two GPUs with room for the model each. Use planner.solver sha-ea, or add GPUs"
        )
    return best.plan, compared


def _balanced_cuts(problem: Problem, made: Made, definition: Definition, deadline: float) -> tuple[list[_Cut], int]:
    """Return the balanced cuts of all orders of the nodes, those that are the fastest first; how many were compared."""
    listed, cuts, compared = listed_nodes(problem), [], 0
    orders = _orders({name: pieces(nodes) for name, nodes in listed.items()}, problem.efficiencies)
    if definition.chosen_hosts:
        sets = node_sets(problem, listed)
        orders = ({name: pieces(nodes) for name, nodes in chosen.items()} for chosen in sets)
    for order, apart in product(orders, (False, True)[: 1 + definition.critic_apart]):
        cut, tried = _balanced_cut(problem, order, apart, made, definition, deadline)
        compared += tried
        cuts += [cut] if cut else []
        if cuts and time.monotonic() > deadline:
            break
    return sorted(cuts, key=lambda cut: cut.plain.seconds)[:TUNED_CUTS], compared


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
    problem: Problem, order: Mapping[str, Nodes], apart: bool, made: Made, definition: Definition, deadline: float
) -> tuple[_Cut | None, int]:
    """Return the cut that balances the stages, critic `apart` or not, and the layouts compared; None: none fits."""
    best: _Cut | None = None
    least, compared = float("inf"), 0
    trials = replace(PLAIN, shares=definition.shares)
    for nodes in _divisions(order):
        placed = critic_apart(nodes, (n for n in nodes if n != ACTOR_GENERATION)) if apart else nodes
        if placed is None:
            continue
        found = tuned(problem, placed, made, trials, deadline)
        compared += found.compared
        if found.plan and (slower := _slowest_stage(found.plan)) < least:
            best, least = _Cut(placed, found), slower
        if best and time.monotonic() > deadline:
            break
    return best, compared


def _divisions(order: Mapping[str, Nodes]) -> Iterator[dict[str, Nodes]]:
    """Yield the trainer's first pieces and the others, for each place of the cut that gives every task some.

    Where no site has every engine, the stages use different sites anyway and there is nothing to divide.
    """
    devices = {name: {device for node in nodes for device in node} for name, nodes in order.items()}
    rest = set().union(*(own for name, own in devices.items() if name != ACTOR_GENERATION))
    found: Iterable[Mapping[str, Nodes]] = (order,)
    if devices[ACTOR_GENERATION] & rest:
        total = max(map(len, order.values()))
        found = (
            {name: nodes[cut:] if name == ACTOR_GENERATION else nodes[:cut] for name, nodes in order.items()}
            for cut in range(1, total, max(total // MOST_CUTS, 1))
        )
    for parts in found:
        if all(parts.values()):
            yield {name: by_node(chain.from_iterable(own)) for name, own in parts.items()}


def _slowest_stage(plan: Plan) -> float:
    """Return the seconds of the group that is busy for longest."""
    return max(sum(plan.predicted.tasks[name] for name in group.tasks) for group in plan.groups)
