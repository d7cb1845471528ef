"""sha-ea: nested successive halving over groupings and device counts, evolution below (HetRL, arXiv 2512.12476, s. 4).

    arms = every set partition of the tasks                                          (level 1)
    each arm: a few vectors of device counts per group, one candidate each           (level 2)
    keep the better quarter of the arms
    budget = START
    while budget <= LAST:
        for each arm, for each of its count vectors:
            population = candidates with these counts                                (level 3)
            repeat `budget` times:
                child = mutate(best of two drawn from the population)
                    - move some devices of one class from one group to another
                    - swap devices of two classes between two groups
                    - give idle devices to a group
                replace the worst of the population if the child is better
        order the arms by their best; keep the better half, each with its better half of count vectors
        budget = 2 x budget

Levels 4 (parallelism, layers, samples, recompute, idle states) and 5 (devices inside the classes, whole nodes first) of
each group are solved by enumeration in `groups`, once for each distinct (tasks, allotment). The clock is read only to
stop; the same seed gives the same plan whenever the rounds end before the budget does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetrl.search.evaluate import INFEASIBLE, Candidate, Evaluator, Value
from hetrl.search.space import Allotment, Grouping, Space, set_partitions
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, CRITIC_TRAINING

START_BUDGET = 2
LAST_BUDGET = 128
COUNT_VECTORS = 2
POPULATION = 8
# How much of the devices a task tends to want: the seconds of equal devices, training 6 N, decode slow per token.
_APPETITE = {ACTOR_GENERATION: 4.0, ACTOR_TRAINING: 4.0, CRITIC_TRAINING: 4.0}


@dataclass
class Counts:
    """One count vector of an arm with its population: (seconds, candidate), best first."""

    population: list[tuple[float, Candidate]] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Return the seconds of the best candidate."""
        return self.population[0][0] if self.population else INFEASIBLE


@dataclass
class Arm:
    """One grouping with the count vectors that are still alive."""

    grouping: Grouping
    counts: list[Counts]

    @property
    def best(self) -> float:
        """Return the seconds of the arm's best candidate."""
        return min(counts.best for counts in self.counts)


def search(space: Space, evaluator: Evaluator, budget_seconds: float, seed: int) -> Value:
    """Return the best value found; infinite seconds where nothing is feasible."""
    rng = random.Random(seed)
    deadline = time.monotonic() + budget_seconds

    def late() -> bool:
        return time.monotonic() > deadline

    arms = [Arm(grouping, []) for grouping in sorted(set_partitions(space.problem.workload.tasks), key=len)]
    for arm in arms:
        arm.counts = [_start(space, evaluator, arm.grouping, index, seed) for index in range(COUNT_VECTORS)]
        if late() and arm.best < INFEASIBLE:
            break
    arms = _better([arm for arm in arms if arm.counts], 4)
    budget = START_BUDGET
    while budget <= LAST_BUDGET and not late():
        for arm in arms:
            for counts in arm.counts:
                _evolve(space, evaluator, counts, budget, rng, late)
        arms = _better(arms, 2)
        for arm in arms:
            arm.counts = sorted(arm.counts, key=lambda counts: counts.best)[: max(len(arm.counts) // 2, 1)]
        budget *= 2
    population = [entry for arm in arms for counts in arm.counts for entry in counts.population]
    if not population:
        return Value(INFEASIBLE, ())
    return evaluator.value(min(population, key=lambda entry: entry[0])[1])


def _better(arms: list[Arm], divisor: int) -> list[Arm]:
    """Return the best of the arms, best first: one in `divisor`, at least two."""
    return sorted(arms, key=lambda arm: arm.best)[: max(len(arms) // divisor, 2)]


def _start(space: Space, evaluator: Evaluator, grouping: Grouping, index: int, seed: int) -> Counts:
    """Return a population for one count vector: the first in proportion to the appetite, the others at random.

    The order in which nodes are dealt depends on the count vector alone, so that groupings meet the same allotments.
    """
    rng = random.Random(f"{seed}/{index}")
    order = deal_order(space, rng)
    appetite = [sum(_APPETITE.get(task, 1.0) for task in tasks) for tasks in grouping]
    if index:
        appetite = [value * rng.uniform(0.3, 1.5) for value in appetite]
    counts = Counts()
    _add(counts, evaluator, (grouping, _deal(space, grouping, appetite, order)))
    return counts


def deal_order(space: Space, rng: random.Random) -> list[tuple[int, int]]:
    """Return (class, devices) pieces: whole nodes, sites in random order; parts of nodes where nodes are few."""
    sites = list(dict.fromkeys(kind.site for kind in space.classes))
    rng.shuffle(sites)
    pieces = [
        (index, len(node))
        for site in sites
        for index, kind in enumerate(space.classes)
        if kind.site == site
        for node in space.nodes[index]
    ]
    few = len(pieces) < len(space.problem.workload.tasks)
    return [(kind, part) for kind, size in pieces for part in (_parts(size) if few else [size])]


def _deal(
    space: Space, grouping: Grouping, appetite: Sequence[float], order: Sequence[tuple[int, int]]
) -> tuple[Allotment, ...]:
    """Deal the pieces in order: each group takes until it has its part, then the next one does.

    A piece that no task of the group can use goes to the group that lacks most among those that can.
    """
    got = [[0] * len(space.sizes) for _ in grouping]
    total = sum(size for _, size in order)
    part = [value * total / sum(appetite) for value in appetite]
    for kind, size in order:
        able = [g for g, tasks in enumerate(grouping) if any(space.usable(task, kind) for task in tasks)]
        if able:
            lacking = [g for g in able if sum(got[g]) + size / 2 <= part[g]]
            chosen = lacking[0] if lacking else min(able, key=lambda g: sum(got[g]) / part[g])
            got[chosen][kind] += size
    return tuple(tuple(row) for row in got)


def _parts(size: int) -> list[int]:
    """Cut a node in at most four equal parts, single devices where it has few."""
    part = size // 4 if size % 4 == 0 else 1
    return [part] * (size // part)


def _evolve(
    space: Space,
    evaluator: Evaluator,
    counts: Counts,
    budget: int,
    rng: random.Random,
    late: Callable[[], bool],
) -> None:
    for _ in range(budget):
        if late() or not counts.population:
            return
        drawn = [rng.choice(counts.population) for _ in range(2)]
        parent = min(drawn, key=lambda entry: entry[0])[1]
        child = mutate(space, parent, rng)
        if child is not None:
            _add(counts, evaluator, child)


def _add(counts: Counts, evaluator: Evaluator, candidate: Candidate) -> None:
    if any(candidate == known for _, known in counts.population):
        return
    counts.population.append((evaluator.value(candidate).seconds, candidate))
    counts.population.sort(key=lambda entry: entry[0])
    del counts.population[POPULATION:]


def mutate(space: Space, parent: Candidate, rng: random.Random) -> Candidate | None:
    """Return a changed copy: devices moved, swapped or taken from the idle; None where nothing changes."""
    grouping, allotments = parent
    rows = [list(row) for row in allotments]
    idle = [size - sum(row[kind] for row in rows) for kind, size in enumerate(space.sizes)]
    if len(rows) == 1 and not any(idle):
        return None
    rows.append(idle)
    kind = rng.randrange(len(space.sizes))
    source, target = rng.sample(range(len(rows)), 2)
    if not rows[source][kind]:
        return None
    amount = _amount(space.classes[kind].gpus_per_node, rows[source][kind], rng)
    rows[source][kind] -= amount
    rows[target][kind] += amount
    if rng.random() < 0.5:
        _swap_back(space, rows, source, target, kind, amount, rng)
    changed = tuple(tuple(row) for row in rows[:-1])
    return (grouping, changed) if changed != allotments else None


def _amount(node: int, available: int, rng: random.Random) -> int:
    """Draw how many devices to move: mostly whole nodes, then halves, quarters and single ones, or all."""
    wanted = rng.choice((node, node, node, max(node // 2, 1), max(node // 4, 1), available))
    return min(wanted, available)


def _swap_back(
    space: Space, rows: list[list[int]], source: int, target: int, kind: int, amount: int, rng: random.Random
) -> None:
    """Return as many devices of another class, so that both keep their counts."""
    others = [k for k in range(len(space.sizes)) if k != kind and rows[target][k] >= amount]
    if others:
        other = rng.choice(others)
        rows[target][other] -= amount
        rows[source][other] += amount
