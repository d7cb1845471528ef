"""Uniform layouts, as frameworks for equal GPUs run them: one TP, PP and DP, equal layers, equal samples.

A user of such a framework tunes by trial. `tuned` does the same, with the cost model in place of the trial runs:

    one Megatron layout for all trainings: TP x PP x DP over all given nodes, micro-batch, recomputation
    each forward-only task and generation: its TP, replicas over all its nodes
    for idle states: all resident | trainings offloaded | everything offloaded
      the few fastest training layouts that fit beside the others
        x each TP of generation, with the KV cache that is left
          value the whole plan; the fastest is kept

Degrees that leave a GPU over are not legal here: Megatron refuses a world that TP x PP does not divide.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from hetrl.cost.iteration import task_cost
from hetrl.cost.stages import model_of
from hetrl.hardware import Device
from hetrl.plan.plan import RECOMPUTES, Plan, Replica, Stage, TaskPlan
from hetrl.problem import Problem
from hetrl.search.assemble import Made, finish
from hetrl.search.baselines.by_speed import samples_by_speed
from hetrl.search.baselines.definition import BY_SPEED, EQUAL
from hetrl.search.baselines.memory import fits_alone, with_kv_cache
from hetrl.search.core.tables import MAX_STAGES
from hetrl.search.core.tables_serving import MAX_SEQUENCES
from hetrl.search.space import clique, powers_of_two
from hetrl.workload import (
    ACTOR_GENERATION,
    CRITIC_INFERENCE,
    CRITIC_TRAINING,
    ENGINE_OF_TASK,
    INFERENCES,
    REWARD_INFERENCE,
    TASKS,
    TRAININGS,
    Architecture,
)

MICRO_BATCHES = (1, 2, 4, 8)
LEAST_PIECES = 8  # so that a division between two stages has some choice
KEPT = 6  # training layouts that are valued as whole plans, for each choice of idle states
OFFLOADED: tuple[frozenset[str], ...] = (frozenset(), frozenset(TRAININGS), frozenset(TASKS))  # in turn

_CRITIC = (CRITIC_TRAINING, CRITIC_INFERENCE, REWARD_INFERENCE)

Nodes = tuple[tuple[Device, ...], ...]  # the devices of each node, in the order of the ranks


@dataclass(frozen=True)
class Trials:
    """What the tuning of one set of nodes may try; `orders` places stages over neighbours, replicas over them or both.

    In Megatron's rank order (`stages`) the replicas of one stage are neighbours in the list of nodes, and stages lie
    far apart; `replicas` puts the stages of one replica on neighbours instead. `shares` is that of a `Definition`.
    """

    orders: tuple[str, ...] = ("stages",)
    micro_batches: tuple[int, ...] = MICRO_BATCHES
    shardings: tuple[str, ...] = ("data_parallel",)
    kept: int = KEPT
    shares: str = EQUAL


@dataclass(frozen=True)
class Tuned:
    """The fastest plan, None where nothing fits, and how many layouts were compared for it."""

    plan: Plan | None
    compared: int

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of an iteration; infinite without a plan."""
        return self.plan.predicted.iteration_seconds if self.plan else float("inf")


def listed_nodes(problem: Problem) -> dict[str, Nodes]:
    """Return the nodes of each task, in the order of the topology's file.

    A site without one of the engines or without a link to the others is left out; where no site has all engines, each
    task uses the sites that have its own. Slices of GPUs are left out: equal ranks form one world.
    """
    topology, tasks = problem.topology.whole_gpus, problem.workload.tasks
    linked = clique(topology)
    sites = [site for site in topology.sites if site.name in linked]
    whole = [site for site in sites if all(ENGINE_OF_TASK[name] in site.engines for name in tasks)]
    found = {}
    for name in tasks:
        used = {site.name for site in whole or sites if ENGINE_OF_TASK[name] in site.engines}
        found[name] = by_node(device for device in topology.devices if device.site in used)
    return found


def by_node(devices: Iterable[Device]) -> Nodes:
    """Return the devices of each node, nodes in the order of their first device."""
    found: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        found.setdefault((device.site, device.node), []).append(device)
    return tuple(tuple(node) for node in found.values())


def pieces(nodes: Nodes) -> Nodes:
    """Return what either of two stages may get: whole nodes; their halves, quarters, ... where nodes are few."""
    parts = list(nodes)
    while len(parts) < LEAST_PIECES and any(len(part) > 1 for part in parts):
        halves = [(part[: len(part) // 2], part[len(part) // 2 :]) for part in parts]
        parts = [half for pair in halves for half in pair if half]
    return tuple(parts)


def critic_apart(nodes: Mapping[str, Nodes], tasks: Iterable[str]) -> dict[str, Nodes] | None:
    """Return the nodes with critic and reward model on the second half of those of `tasks`, the others on the first.

    None without a critic, or where there is nothing to halve.
    """
    divided = dict(nodes)
    for name in tasks:
        parts = nodes[name] if len(nodes[name]) > 1 else pieces(nodes[name])
        half = len(parts) // 2
        divided[name] = parts[half:] if name in _CRITIC else parts[:half]
    return divided if CRITIC_TRAINING in nodes and all(divided.values()) else None


def tuned(
    problem: Problem, nodes: Mapping[str, Nodes], made: Made, trials: Trials = Trials(), deadline: float = float("inf")
) -> Tuned:
    """Return the fastest uniform plan with each task on all of its nodes.

    After `deadline` (of `time.monotonic`) the search ends with the best so far, once there is one.
    """
    if not all(nodes.values()):
        return Tuned(None, 0)
    workload = problem.workload
    trainings = ranked_trainings(problem, nodes, trials)
    inferences = {n: fastest_inference(n, nodes[n], problem, trials.shares) for n in workload.tasks if n in INFERENCES}
    generations = generation_layouts(nodes[ACTOR_GENERATION], problem)
    best, compared = Tuned(None, 0), len(trainings) + len(generations)
    forward = {name: task for name, task in inferences.items() if task is not None}
    if len(forward) < len(inferences):
        return Tuned(None, compared)
    for offloaded in OFFLOADED:
        kept = 0
        for chosen in trainings:
            found = _valued(problem, {**forward, **chosen}, generations, offloaded, trials.shares, made)
            compared += len(found)
            best = min([best, *(Tuned(plan, 0) for plan in found)], key=lambda one: one.seconds)
            kept += bool(found)
            if kept == trials.kept or (best.plan and time.monotonic() > deadline):
                break
    return Tuned(best.plan, compared)


def _valued(
    problem: Problem,
    others: Mapping[str, TaskPlan],
    generations: Sequence[TaskPlan],
    offloaded: frozenset[str],
    shares: str,
    made: Made,
) -> list[Plan]:
    """Return the whole plans, with their predictions, of those generations that fit beside the other tasks."""
    others = {n: replace(task, idle_state="offload" if n in offloaded else "resident") for n, task in others.items()}
    found = []
    for task in generations:
        generation = replace(task, idle_state="offload" if ACTOR_GENERATION in offloaded else "sleep")
        tasks = with_kv_cache({**others, ACTOR_GENERATION: generation}, problem)
        if tasks is not None:
            tasks[ACTOR_GENERATION] = _divided(ACTOR_GENERATION, tasks[ACTOR_GENERATION], shares, problem)
            found.append(finish(problem, [tasks], made))
    return found


def ranked_trainings(problem: Problem, nodes: Mapping[str, Nodes], trials: Trials) -> list[dict[str, TaskPlan]]:
    """Return the training tasks in each layout in which each of them fits alone, the fastest first."""
    names = [name for name in problem.workload.tasks if name in TRAININGS]
    ranked: list[tuple[float, dict[str, TaskPlan]]] = []
    tensors = powers_of_two(max(len(node) for name in names for node in nodes[name]))
    settings = product(trials.orders, trials.shardings, trials.micro_batches, RECOMPUTES)
    for tensor, pipeline, setting in product(tensors, range(1, MAX_STAGES + 1), list(settings)):
        tasks = {n: training_layout(n, nodes[n], tensor, pipeline, setting, problem) for n in names}
        fitting = {
            n: _divided(n, task, trials.shares, problem)
            for n, task in tasks.items()
            if task is not None and fits_alone(n, task, problem)
        }
        if len(fitting) == len(names):
            ranked.append((sum(task_cost(n, task, problem.model).seconds for n, task in fitting.items()), fitting))
    return [fitting for _, fitting in sorted(ranked, key=lambda entry: entry[0])]


def training_layout(
    name: str, nodes: Nodes, tensor: int, pipeline: int, setting: tuple[str, str, int, str], problem: Problem
) -> TaskPlan | None:
    """Return a training task in one layout; None where Megatron does not take it.

    `setting` is the order, the optimiser's sharding, the micro-batch and the recomputation. One replica has nothing
    to shard; with one stage or one replica there is one order.
    """
    order, sharding, micro_batch, recompute = setting
    workload = problem.workload
    model, units = model_of(name, workload), units_of(nodes, tensor)
    if not units or len(units) % pipeline or pipeline > model.layers or model.heads % tensor or model.kv_heads % tensor:
        return None
    count = len(units) // pipeline
    if order == "replicas" and min(count, pipeline) == 1:
        return None
    if workload.samples % micro_batch or workload.samples < count * micro_batch:
        return None
    if order == "replicas":
        units = [units[r * pipeline + i] for i in range(pipeline) for r in range(count)]
    replicas = equal_replicas(units, pipeline, model, workload.samples, micro_batch)
    sharding = sharding if count > 1 else "none"
    return TaskPlan(
        ENGINE_OF_TASK[name], replicas, "resident", micro_batch, recompute, workload.gradient_dtype, sharding
    )


def _divided(name: str, task: TaskPlan, shares: str, problem: Problem) -> TaskPlan:
    return samples_by_speed(name, task, problem) if shares == BY_SPEED else task


def fastest_inference(name: str, nodes: Nodes, problem: Problem, shares: str = EQUAL) -> TaskPlan | None:
    """Return a forward-only task in the TP and micro-batch that are fastest; None where no TP fits."""
    found: list[TaskPlan] = []
    for replicas, micro_batch in product(_serving_replicas(name, nodes, 1, problem), MICRO_BATCHES):
        task = TaskPlan(ENGINE_OF_TASK[name], replicas, micro_batch=micro_batch)
        if model_of(name, problem.workload).kv_heads % task.tensor_parallel == 0 and fits_alone(name, task, problem):
            found.append(_divided(name, task, shares, problem))
    return min(found, key=lambda task: task_cost(name, task, problem.model).seconds, default=None)


def generation_layouts(nodes: Nodes, problem: Problem) -> list[TaskPlan]:
    """Return generation in each TP that the nodes and the model allow; its KV cache is still to be found."""
    found = _serving_replicas(ACTOR_GENERATION, nodes, problem.workload.samples_per_prompt, problem)
    return [generation_of(replicas) for replicas in found]


def generation_of(replicas: Iterable[Replica]) -> TaskPlan:
    """Return generation by these replicas; its KV cache is still to be found."""
    return TaskPlan(
        ENGINE_OF_TASK[ACTOR_GENERATION], tuple(replace(replica, max_sequences=MAX_SEQUENCES) for replica in replicas)
    )


def _serving_replicas(name: str, nodes: Nodes, unit: int, problem: Problem) -> list[tuple[Replica, ...]]:
    """Return the replicas of each TP in which all of them get samples; the largest TP where there are always too many.

    So no GPU is left out by the choice of a small TP: which GPUs work is not for the framework to choose.
    """
    workload, model, found = problem.workload, model_of(name, problem.workload), []
    tensors = [t for t in powers_of_two(max(map(len, nodes))) if model.heads % t == 0 and units_of(nodes, t)]
    for tensor in tensors:
        units = units_of(nodes, tensor)
        if len(units) * unit <= workload.samples or tensor == tensors[-1]:
            found.append(equal_replicas(units, 1, model, workload.samples, unit))
    return found


def units_of(nodes: Nodes, tensor: int) -> list[tuple[str, ...]]:
    """Return the tensor-parallel groups over all nodes, in order; none where a node's GPUs do not divide by it."""
    if any(len(node) % tensor for node in nodes):
        return []
    return [
        tuple(device.id for device in node[start : start + tensor])
        for node in nodes
        for start in range(0, len(node), tensor)
    ]


def equal_replicas(
    units: Sequence[tuple[str, ...]], stages: int, model: Architecture, samples: int, unit: int
) -> tuple[Replica, ...]:
    """Return replicas with equal layers and equal samples, in Megatron's order: stage i of replica r is i x DP + r.

    What does not divide is as equal as whole layers and multiples of `unit` samples allow; replicas that would get no
    sample are left out.
    """
    degree = len(units) // stages
    count = min(degree, samples // unit)
    bounds = [model.layers * index // stages for index in range(stages + 1)]
    shares = [(samples // unit * (r + 1) // count - samples // unit * r // count) * unit for r in range(count)]
    return tuple(
        Replica(shares[r], tuple(Stage(units[i * degree + r], (bounds[i], bounds[i + 1])) for i in range(stages)))
        for r in range(count)
    )
