"""The best legal plan of a tiny job of generation and one training, found by trying all without the search's encoding.

    training     every grid, place, layer split, micro-batch, optimiser sharding and division of the samples; no
                 recomputation, a selective one, or as few whole layers of each stage as memory asks for
    generation   every set of replicas inside nodes, with equal stages, every division of the prompts, and of each
                 replica every number of sequences at once, with the least KV cache that holds so many
    groups       one with every idle state where the tasks share devices, else two

Devices of a node are equal: a training takes the first ones, generation any. What the workload or the planner fixes is
no choice: the gradients' type, the most sequences of a server.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, permutations, product

import numpy as np
import numpy.typing as npt

from hetrl.cost.check import violations
from hetrl.cost.iteration import plan_seconds, switch_seconds, task_cost, with_prediction
from hetrl.cost.memory import least_kv_cache_gb, rollout_shapes, task_footprints
from hetrl.cost.model import CostModel
from hetrl.cost.training import Cost
from hetrl.cost.weight_sync import SyncCost, weight_routes, weight_sync_cost
from hetrl.hardware import Topology
from hetrl.plan.plan import (
    SHARDINGS,
    Algorithm,
    Group,
    Plan,
    Predicted,
    Replica,
    Solver,
    Stage,
    TaskPlan,
    node_of,
    sites_of,
)
from hetrl.problem import Problem
from hetrl.search.core.tables_serving import equal_stages, max_sequences
from hetrl.search.core.tables_training import micro_batch_sizes
from hetrl.search.space import powers_of_two
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING

Floats = npt.NDArray[np.float64]
Ranks = tuple[str, ...]  # device ids of one stage
Stages = tuple[Stage, ...]  # of one replica
IDLE = {ACTOR_GENERATION: ("resident", "sleep", "offload"), ACTOR_TRAINING: ("resident", "offload")}
ROUNDING = 1e-9  # relative


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every division of a total into so many positive parts, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(last - first for first, last in pairwise((0, *cuts, total)))


def rows_of_units(topology: Topology, ranks: int, count: int) -> Iterator[tuple[Ranks, ...]]:
    """Yield every row of so many disjoint units: each so many devices of one node."""
    nodes: defaultdict[str, list[str]] = defaultdict(list)
    for device in topology.devices:
        nodes[device.node_id].append(device.id)
    units = [unit for devices in nodes.values() for unit in combinations(devices, ranks)]
    for row in permutations(units, count):
        if len({device for unit in row for device in unit}) == ranks * count:
            yield row


def _first_of_nodes(row: Collection[Ranks]) -> bool:
    """Return whether the devices are the first ones of each node, in order."""
    seen: defaultdict[str, int] = defaultdict(int)
    for device in (device for unit in row for device in unit):
        node = node_of(device)
        if device != f"{node}/{seen[node]}":
            return False
        seen[node] += 1
    return True


def training_grids(problem: Problem) -> Iterator[tuple[Stages, ...]]:
    """Yield the stages of every replica of a training, for every grid, place and layer split."""
    model, counts = problem.workload.actor, range(1, len(problem.topology.devices) + 1)
    degrees = [ranks for ranks in powers_of_two(counts[-1]) if model.heads % ranks == model.kv_heads % ranks == 0]
    for ranks, stages, replicas in product(degrees, counts, counts):
        if ranks * stages * replicas > counts[-1] or stages > model.layers:
            continue
        rows = filter(_first_of_nodes, rows_of_units(problem.topology, ranks, stages * replicas))
        for row, cuts in product(rows, combinations(range(1, model.layers), stages - 1)):
            spans = tuple(pairwise((0, *cuts, model.layers)))
            placed = [Stage(unit, spans[index % stages]) for index, unit in enumerate(row)]
            yield tuple(tuple(placed[first : first + stages]) for first in range(0, len(placed), stages))


def trainings(problem: Problem) -> Iterator[TaskPlan]:
    """Yield every training that stays resident, but for those that recompute whole layers."""
    workload = problem.workload
    for grid, micro_batch in product(training_grids(problem), micro_batch_sizes(workload)):
        for shares in compositions(workload.samples // micro_batch, len(grid)):
            replicas = tuple(Replica(share * micro_batch, stages) for share, stages in zip(shares, grid, strict=True))
            for recompute, sharding in product(("none", "selective"), SHARDINGS if len(grid) > 1 else SHARDINGS[:1]):
                yield TaskPlan(
                    "megatron",
                    replicas,
                    micro_batch=micro_batch,
                    recompute=recompute,
                    gradient_dtype=workload.gradient_dtype,
                    optimizer_sharding=sharding,
                )


def rollout_replicas(problem: Problem) -> list[Stages]:
    """Return the stages of every replica of generation that fits into a node."""
    model, found = problem.workload.actor, []
    largest = max(node.gpus for site in problem.topology.sites for node in site.nodes)
    for ranks, stages in product(powers_of_two(largest), range(1, min(largest, model.layers) + 1)):
        for row in rows_of_units(problem.topology, ranks, stages) if model.heads % ranks == 0 else ():
            if len({node_of(unit[0]) for unit in row}) == 1:
                found.append(equal_stages(row, model.layers))
    return found


def servers(stages: Stages, samples: int, problem: Problem) -> list[Replica]:
    """Return a replica for each number of sequences at once that makes a difference, with the least KV cache for it."""
    workload = problem.workload
    bare = Replica(samples, stages, max_sequences=max_sequences(workload))
    shapes = rollout_shapes(bare, problem.model)
    least = least_kv_cache_gb(shapes, workload)
    sequence = workload.sequence_tokens * max(shape.kv_bytes_per_token for shape in shapes) / 1e9
    caches = {math.ceil(max(count * sequence, least) * 1e6) / 1e6 for count in range(1, bare.max_sequences + 1)}
    found: dict[object, Replica] = {}
    for cache in sorted(caches, reverse=True):
        replica = replace(bare, kv_cache_gb=cache)
        parts = task_cost(ACTOR_GENERATION, TaskPlan("vllm", (replica,)), problem.model).parts
        found[tuple(parts.values())] = replica
    return [*found.values()]


def generations(problem: Problem) -> Iterator[TaskPlan]:
    """Yield every generation that stays resident."""
    workload, known = problem.workload, rollout_replicas(problem)
    least = workload.samples_per_prompt
    for count in range(1, len(problem.topology.devices) + 1):
        for chosen in combinations(known, count):
            devices = [device for stages in chosen for stage in stages for device in stage.devices]
            if len(devices) > len({*devices}):
                continue
            for shares in compositions(workload.samples // least, count):
                choices = [
                    servers(stages, share * least, problem) for stages, share in zip(chosen, shares, strict=True)
                ]
                yield from (TaskPlan("vllm", replicas) for replicas in product(*choices))


def fitted(name: str, task: TaskPlan, rooms: Mapping[str, float], model: CostModel) -> TaskPlan | None:
    """Return the task, or the training with the fewest whole layers recomputed, that fits into the GB of its devices.

    None where nothing does. What a stage recomputes is no matter of the other stages' memory.
    """
    while over := {device for device, need in task_footprints(name, task, model) if need.total_gb > rooms[device]}:
        if name != ACTOR_TRAINING or task.recompute == "selective":
            return None
        stages = [[_with_one_more(stage, over) for stage in replica.stages] for replica in task.replicas]
        if any(stage.recompute_layers > stage.layers[1] - stage.layers[0] for own in stages for stage in own):
            return None
        replicas = (replace(replica, stages=tuple(own)) for replica, own in zip(task.replicas, stages, strict=True))
        task = replace(task, replicas=tuple(replicas), recompute="full")
    return task


def _with_one_more(stage: Stage, over: Collection[str]) -> Stage:
    """Return the stage with one more recomputed layer if one of its devices is among these."""
    return replace(stage, recompute_layers=(stage.recompute_layers or 0) + any(d in over for d in stage.devices))


@dataclass(frozen=True)
class Way:
    """One way to run a task. `seconds`: of an iteration with the idle state, `shortest`: of its samples alone."""

    task: TaskPlan
    cost: Cost
    seconds: float
    shortest: float


def way(name: str, task: TaskPlan, model: CostModel) -> Way:
    """Return what the cost model says of a task."""
    cost = task_cost(name, task, model)
    return Way(task, cost, cost.seconds + switch_seconds(name, task, model), cost.parts.get("whole", cost.seconds))


@dataclass(frozen=True)
class Place:
    """The ways to run a task that new weights cannot tell apart: they travel between the same devices."""

    ways: tuple[Way, ...]

    @cached_property
    def resident(self) -> Place:
        """Return the place without the ways that leave their devices while others run."""
        return Place(tuple(one for one in self.ways if one.task.idle_state == "resident"))

    @cached_property
    def seconds(self) -> Floats:
        """Return [2, way]: the seconds of an iteration and those of a prompt."""
        return np.array([(one.seconds, one.shortest) for one in self.ways]).T


def places(name: str, problem: Problem) -> list[Place]:
    """Return every way to run a task that fits empty devices, with every idle state."""
    model, found = problem.model, defaultdict(list)
    rooms = {device.id: model.rates(device.id).usable_gb for device in problem.topology.devices}
    for task in generations(problem) if name == ACTOR_GENERATION else trainings(problem):
        if fitting := fitted(name, task, rooms, model):
            place: object = frozenset(task.devices), task.replicas[0].stages
            if name == ACTOR_GENERATION:
                place = tuple(tuple(stage.devices for stage in replica.stages) for replica in task.replicas)
            found[place] += [way(name, replace(fitting, idle_state=state), model) for state in IDLE[name]]
    return [Place(tuple(ways)) for ways in found.values()]


@dataclass
class BruteForce:
    """Values every pair of ways that may be faster than the best legal plan so far."""

    problem: Problem
    seconds: float = math.inf
    plan: Plan | None = None

    def optimum(self) -> Plan:
        """Return the fastest legal plan, with its prediction."""
        for pair in product(*(places(name, self.problem) for name in (ACTOR_GENERATION, ACTOR_TRAINING))):
            shared = not {*pair[0].ways[0].task.devices}.isdisjoint(pair[1].ways[0].task.devices)
            self._try_places(*(pair if shared else (place.resident for place in pair)), shared)
        assert self.plan is not None
        return with_prediction(self.plan, self.problem.model)

    def _try_places(self, generation: Place, training: Place, shared: bool) -> None:
        """Try the pairs of two places, those first that may be the fastest."""
        plan = self._planned(generation.ways[0].task, training.ways[0].task, shared)
        sync = weight_sync_cost(plan.weight_sync, plan.tasks, self.problem.model)
        least = self._least_seconds(generation, training, shared, sync) * (1 - ROUNDING)
        for index in np.argsort(least, axis=None):
            row, column = np.unravel_index(index, least.shape)
            if least[row, column] >= self.seconds:
                break
            self._try(generation.ways[row], training.ways[column], shared, sync)

    def _least_seconds(self, generation: Place, training: Place, shared: bool, sync: SyncCost) -> Floats:
        """Return [generation, training] seconds that no plan of the two takes less than.

        In mode sync, and on shared devices, the tasks take turns. In mode async generation stands still while a version
        is loaded; and 1 + staleness iterations have the time in which a prompt is generated and trained on, and its
        version is sent.
        """
        (first, shortest), (second, _) = generation.seconds[:, :, None], training.seconds[:, None, :]
        staleness = self.problem.workload.staleness
        if not staleness:
            return first + second + sync.seconds
        turns = np.maximum(first + sync.pause_seconds + (second if shared else 0.0), second)
        return np.maximum(turns, (shortest + second + sync.seconds) / (1 + staleness))

    def _try(self, generation: Way, training: Way, shared: bool, sync: SyncCost) -> None:
        """Keep a pair that is faster and legal; a training that lacks memory recomputes more layers."""
        plan, model = self._planned(generation.task, training.task, shared), self.problem.model
        costs = {ACTOR_GENERATION: generation.cost, ACTOR_TRAINING: training.cost}
        seconds = plan_seconds(plan, costs, {"actor": sync}, model)
        if seconds >= self.seconds:
            return
        if not violations(plan, model):
            self.seconds, self.plan = seconds, plan
        rooms = {device: model.rates(device).usable_gb for device in plan.devices}
        for device, need in task_footprints(ACTOR_GENERATION, generation.task, model):
            rooms[device] -= need.resident_gb
        fitting = fitted(ACTOR_TRAINING, training.task, rooms, model)
        if fitting and fitting != training.task:
            self._try(generation, way(ACTOR_TRAINING, fitting, model), shared, sync)

    def _planned(self, generation: TaskPlan, training: TaskPlan, shared: bool) -> Plan:
        """Return the plan of two tasks, without a prediction."""
        tasks, job = {ACTOR_GENERATION: generation, ACTOR_TRAINING: training}, self.problem.workload
        rollouts = Group((ACTOR_GENERATION,), generation.devices, "array")
        together = Group(tuple(tasks), tuple(dict.fromkeys((*generation.devices, *training.devices))))
        return Plan(
            algorithm=Algorithm(job.algorithm, job.mode, job.max_staleness, job.optimizer_steps_per_iteration),
            groups=(together,) if shared else (rollouts, Group((ACTOR_TRAINING,), training.devices)),
            tasks=tasks,
            weight_sync=weight_routes(tasks),
            site_order=tuple(sites_of((*training.devices, *generation.devices))),
            predicted=Predicted(0.0, 0.0),
            solver=Solver("brute force", 0, 0.0, 0),
        )
