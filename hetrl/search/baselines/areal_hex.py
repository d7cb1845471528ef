"""AReaL-Hex: a MILP for strategies and work, a graph partition of the nodes into trainer and rollouts, in turns.

    partitions: the trainer's nodes grown from each class of nodes towards the best connected ones, every size
    repeat
      columns: for each partition the trainer's best strategies (TP, PP, order of the stages, micro-batch), layers and
        samples by speed; C = their seconds, inferences included, with the links inside the trainer
      phase 1: the MILP chooses a column z and the numbers y of rollout replicas of each class and TP:
        maximise L (iterations per second), one column:  sum z = 1
        L <= sum z / C                                   the trainer keeps up
        samples x L <= sum y x rate                      the rollouts keep up
        sum over TP of TP x y <= GPUs of the class outside the trainer
      phase 2: refine the partition: one node over the cut, or two swapped, from the chosen one
    until no new partition is chosen; samples are divided by rate

Source: AReaL-Hex (arXiv 2511.00796): the two-phase scheduler (constrained search with a MILP that selects strategies
and assigns work under a resource budget; graph partitioning of GPUs and interconnects between rollouts and training),
under a staleness bound; its trainer is Megatron's grid here. Growing: Karypis and Kumar, SIAM J. Sci. Comput. 20
(1998), section 4.2. Moves and swaps: Kernighan and Lin, Bell Syst. Tech. J. 49 (1970); Fiduccia and Mattheyses, DAC
1982. It knows asynchronous training only; for a synchronous job the same stages take turns.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from hetrl.cost.iteration import task_cost
from hetrl.cost.stages import model_of
from hetrl.errors import InfeasibleError
from hetrl.hardware import Device
from hetrl.plan.plan import RECOMPUTES, SHARDINGS, Plan, Replica, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.search.assemble import Made, finish
from hetrl.search.baselines.areal_hex_milp import Column, Counts, Pool, Rollout, choose
from hetrl.search.baselines.by_speed import by_speed, samples_by_rate, samples_by_speed
from hetrl.search.baselines.memory import with_kv_cache
from hetrl.search.baselines.uniform import (
    OFFLOADED,
    Nodes,
    by_node,
    fastest_inference,
    generation_of,
    listed_nodes,
    pieces,
    training_layout,
)
from hetrl.search.baselines.verl_expert import nearest_first
from hetrl.search.core.tables import MAX_STAGES
from hetrl.search.space import Space, powers_of_two
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, INFERENCES, TRAININGS

TUNING = (
    "strategies and work by a MILP, the nodes of trainer and rollouts by graph growing and swaps over the cut: TP, PP, "
    "order of the stages, layers and samples by speed, micro-batch, recomputation, offloading, TP of each rollout GPU"
)
MICRO_BATCHES = (1, 4)
COLUMNS = 3  # strategies kept of each partition
MOST_SIZES = 16  # of the partitions grown from one class


def plan(space: Space, budget_seconds: float, made: Made) -> tuple[Plan, int]:
    """Return AReaL-Hex's plan and the strategies compared; raises InfeasibleError where none fits."""
    deadline = time.monotonic() + budget_seconds
    problem, pools = space.problem, _pools(space.problem)
    rollouts = _rollouts(problem, pools)
    known: dict[Counts, list[Column]] = {}
    best: Plan | None = None
    wanted = list(_grown(problem, pools))
    while wanted:
        for counts in wanted:
            # past the deadline only until there is any strategy
            if counts not in known and (time.monotonic() < deadline or not any(known.values())):
                known[counts] = _columns(problem, pools, counts)
        chosen = choose(
            [column for columns in known.values() for column in columns], rollouts, pools, problem.workload.samples
        )
        if chosen is None:
            break
        column, numbers = chosen
        found = _assembled(problem, pools, column, dict(zip(rollouts, numbers, strict=True)), made)
        if found is None:  # too tight beside what else is there: the next best column
            known[column.counts] = [other for other in known[column.counts] if other is not column]
            continue
        if best is None or found.predicted.iteration_seconds < best.predicted.iteration_seconds:
            best = found
        expired = time.monotonic() > deadline
        wanted = [] if expired else [near for near in _neighbours(column.counts, pools) if near not in known]
    if best is None:
        raise InfeasibleError(
            "areal-hex: no division of the GPUs between training and rollouts fits; it needs at least two GPUs with "
            "room for the model each. Use planner.solver sha-ea, or add GPUs"
        )
    return best, sum(map(len, known.values()))


def _pools(problem: Problem) -> list[Pool]:
    listed = listed_nodes(problem)
    trains, serves = (set(pieces(listed[name])) for name in (ACTOR_TRAINING, ACTOR_GENERATION))
    found: dict[tuple[str, str, int], list[tuple[Device, ...]]] = {}
    for piece in dict.fromkeys((*pieces(listed[ACTOR_TRAINING]), *pieces(listed[ACTOR_GENERATION]))):
        found.setdefault((piece[0].site, piece[0].gpu, len(piece)), []).append(piece)
    return [Pool(tuple(own), own[0] in trains, own[0] in serves) for own in found.values()]


# --- the partitions ---------------------------------------------------------------------------------------------------


def _grown(problem: Problem, pools: list[Pool]) -> Iterator[Counts]:
    """Yield the trainer's pieces grown from each pool: the best connected piece next, the faster GPU of equals."""
    seen: set[Counts] = set()
    total = sum(len(pool.pieces) for pool in pools if pool.trains)
    for start in (index for index, pool in enumerate(pools) if pool.trains):
        counts = tuple(int(index == start) for index in range(len(pools)))
        for size in range(1, total + 1):
            if counts not in seen and (size % max(total // MOST_SIZES, 1) == 0 or size == 1):
                seen.add(counts)
                yield counts
            open_pools = [i for i, pool in enumerate(pools) if pool.trains and counts[i] < len(pool.pieces)]
            if open_pools:
                nearest = max(open_pools, key=lambda i: _nearness(problem, pools, counts, i))
                counts = tuple(count + (i == nearest) for i, count in enumerate(counts))


def _nearness(problem: Problem, pools: list[Pool], counts: Counts, index: int) -> tuple[float, float]:
    """Return the slowest bandwidth from a pool to those chosen so far, and the speed of its GPUs."""
    device = pools[index].first
    paths = [problem.topology.path(device, pool.first) for pool, n in zip(pools, counts, strict=True) if n]
    return min(path.gbps if path else 0.0 for path in paths), problem.efficiencies.rates(device.gpu).training_flops


def _neighbours(counts: Counts, pools: list[Pool]) -> Iterator[Counts]:
    """Yield the partitions with one piece more or less in the trainer, or one swapped for one of another pool."""
    moves = [
        tuple((i == more) - (i == less) for i in range(len(pools)))
        for more, less in product(range(-1, len(pools)), repeat=2)
        if more != less
    ]
    for move in moves:
        moved = tuple(count + step for count, step in zip(counts, move, strict=True))
        inside = all(0 <= n <= len(pool.pieces) * pool.trains for n, pool in zip(moved, pools, strict=True))
        if inside and any(moved):
            yield moved


# --- the trainer's strategies -----------------------------------------------------------------------------------------


def _columns(problem: Problem, pools: list[Pool], counts: Counts) -> list[Column]:
    """Return the best strategies of a partition, at most `COLUMNS`."""
    workload = problem.workload
    orders = _node_orders(problem, pools, counts)
    inferences = {n: _inference(n, orders[0], problem) for n in workload.tasks if n in INFERENCES}
    forward = {name: task for name, task in inferences.items() if task is not None}
    if len(forward) < len(inferences):
        return []
    names = [name for name in workload.tasks if name in TRAININGS]
    ranked: list[tuple[float, Strategy]] = []
    for strategy in _strategies(orders):
        actor = _training(ACTOR_TRAINING, strategy, problem)
        if actor is not None:
            ranked.append((task_cost(ACTOR_TRAINING, actor, problem.model).seconds, strategy))
    found: list[Column] = []
    for _, strategy in sorted(ranked, key=lambda entry: entry[0]):
        trainings = {name: _training(name, strategy, problem) for name in names}
        tasks = forward | {name: task for name, task in trainings.items() if task is not None}
        if len(tasks) == len(forward) + len(names):
            seconds = sum(task_cost(name, task, problem.model).seconds for name, task in tasks.items())
            found.append(Column(counts, tasks, seconds))
        if len(found) == COLUMNS:
            break
    return found


Strategy = tuple[Nodes, int, int, tuple[str, str, int, str]]  # nodes in order, TP, PP, setting of `training_layout`


def _strategies(orders: list[Nodes]) -> Iterator[Strategy]:
    largest = max(len(node) for node in orders[0])
    sites = {node[0].site for node in orders[0]}
    shardings = SHARDINGS if len(sites) > 1 else ("data_parallel",)
    settings = list(product(("stages", "replicas"), shardings, MICRO_BATCHES, RECOMPUTES))
    yield from product(orders, powers_of_two(largest), range(1, MAX_STAGES + 1), settings)


def _node_orders(problem: Problem, pools: list[Pool], counts: Counts) -> list[Nodes]:
    """Return the trainer's nodes by site and by speed: equal GPUs side by side make unequal stages or replicas."""
    devices = [d for pool, n in zip(pools, counts, strict=True) for piece in pool.pieces[:n] for d in piece]
    nodes = by_node(devices)

    def slowness(node: tuple[Device, ...]) -> float:
        return -problem.efficiencies.rates(node[0].gpu).training_flops

    sites = list(dict.fromkeys(node[0].site for node in sorted(nodes, key=slowness)))
    sites = nearest_first(problem.topology, sites[0], sites)
    by_site = tuple(sorted(nodes, key=lambda node: (sites.index(node[0].site), slowness(node))))
    fast_first = tuple(sorted(by_site, key=slowness))
    return list(dict.fromkeys((by_site, fast_first)))


def _training(name: str, strategy: Strategy, problem: Problem) -> TaskPlan | None:
    uniform = training_layout(name, *strategy, problem)
    return by_speed(name, uniform, problem) if uniform is not None else None


def _inference(name: str, nodes: Nodes, problem: Problem) -> TaskPlan | None:
    """Return a forward-only task on the trainer's nodes, the samples divided by speed."""
    task = fastest_inference(name, nodes, problem)
    return samples_by_speed(name, task, problem, least=0) if task else None


# --- rollouts and the plan -------------------------------------------------------------------------------------------


def _rollouts(problem: Problem, pools: list[Pool]) -> list[Rollout]:
    """Return the kinds of rollout replicas that fit, with their rate where half of all GPUs are replicas like it."""
    workload, found = problem.workload, []
    model = model_of(ACTOR_GENERATION, workload)
    gpus = sum(pool.size * len(pool.pieces) for pool in pools if pool.serves)
    for index, pool in enumerate(pools):
        for tensor in powers_of_two(pool.size) if pool.serves else ():
            if model.heads % tensor or pool.size % tensor:
                continue
            count = min(max(gpus // (2 * tensor), 1), workload.samples // workload.samples_per_prompt)
            stage = Stage(tuple(device.id for device in pool.pieces[0][:tensor]), (0, model.layers))
            shares = samples_by_rate([1.0] * count, workload.samples, workload.samples_per_prompt)
            alike = generation_of(Replica(share, (stage,)) for share in shares)
            alone = with_kv_cache({ACTOR_GENERATION: alike}, problem)
            if alone is not None:
                cost = task_cost(ACTOR_GENERATION, alone[ACTOR_GENERATION], problem.model)
                found.append(Rollout(index, tensor, workload.samples / cost.seconds / count))
    return found


def _assembled(
    problem: Problem, pools: list[Pool], column: Column, numbers: Mapping[Rollout, int], made: Made
) -> Plan | None:
    """Return the fastest plan over the idle states; None where none fits."""
    generation = _placed(problem, pools, column.counts, numbers)
    found = []
    for offloaded in OFFLOADED:
        tasks = {n: replace(t, idle_state="offload" if n in offloaded else "resident") for n, t in column.tasks.items()}
        whole = with_kv_cache({**tasks, ACTOR_GENERATION: generation}, problem)
        if whole is not None:
            found.append(finish(problem, [whole], made))
    return min(found, key=lambda plan: plan.predicted.iteration_seconds, default=None)


def _placed(problem: Problem, pools: list[Pool], counts: Counts, numbers: Mapping[Rollout, int]) -> TaskPlan:
    """Return generation on what the trainer leaves: larger TP first, so that no piece is torn; samples by rate."""
    workload = problem.workload
    layers = (0, model_of(ACTOR_GENERATION, workload).layers)
    free = [[d.id for piece in pool.pieces[n:] for d in piece] for pool, n in zip(pools, counts, strict=True)]
    stages, speeds = [], []
    for kind in sorted(numbers, key=lambda kind: (kind.pool, -kind.tensor)):
        for _ in range(numbers[kind]):
            own, free[kind.pool] = free[kind.pool][: kind.tensor], free[kind.pool][kind.tensor :]
            stages.append(Stage(tuple(own), layers))
            speeds.append(kind.rate)
    shares = samples_by_rate(speeds, workload.samples, workload.samples_per_prompt)
    dealt = zip(shares, stages, strict=True)
    return generation_of(Replica(share, (stage,)) for share, stage in dealt if share)
