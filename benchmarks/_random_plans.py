"""Random feasible plans over random topologies: what the comparison of simulator and cost model runs over."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from hetrl.cost.check import violations
from hetrl.cost.iteration import with_prediction
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths, empirical
from hetrl.plan.plan import RECOMPUTES, Plan, TaskPlan
from hetrl.problem import Problem
from hetrl.search import solve
from hetrl.search.assemble import Made
from hetrl.search.evaluate import Evaluator
from hetrl.search.space import Allotment, Grouping, Space, set_partitions
from hetrl.workload import Workload, architecture

GPUS = ("a100-80gb", "a100-40gb", "l40s", "l4", "h100")
EVALUATIONS, SECONDS = 20_000, 600.0  # of a short search: the first ends it
CHANGES = 300  # tried on the choices of each random plan


@dataclass(frozen=True)
class Case:
    """One plan with what it is for."""

    number: int
    problem: Problem
    plan: Plan


def random_case(number: int, seed: int) -> Case:
    """Return feasible plan `number`; algorithm, mode and one to four sites follow from the number."""
    rng = random.Random(f"{seed}/{number}")
    sites = 1 + number // 4 % 4
    while True:
        problem = Problem(_topology(sites, rng), _workload(number, rng))
        plan = _plan(problem, rng)
        if (
            plan is not None
            and len({device.split("/")[0] for t in plan.tasks.values() for device in t.devices}) == sites
        ):
            return Case(number, problem, _varied(plan, problem, rng))


def searched_case(number: int, seed: int) -> Case:
    """Return the plan that a short search finds for the job and the sites of random plan `number`."""
    problem = random_case(number, seed).problem
    return Case(number, problem, solve(problem, "sha-ea", SECONDS, seed, evaluations=EVALUATIONS))


def _topology(count: int, rng: random.Random) -> Topology:
    sites = []
    for index in range(count):
        gpu, size, nic = rng.choice(GPUS), rng.choice((2, 4, 8)), rng.choice((25.0, 100.0, 400.0))
        nodes = tuple(
            Node(f"n{node}", gpu, size, nic_gbps=nic, host_memory_gb=1024) for node in range(rng.randint(1, 3))
        )
        sites.append(Site(f"s{index}", nodes))
    pairs = combinations([site.name for site in sites], 2)
    return Topology(
        tuple(sites), tuple(Link(pair, rng.uniform(1, 60), rng.choice((0.5, 1, 2, 5, 10))) for pair in pairs)
    )


def _workload(number: int, rng: random.Random) -> Workload:
    algorithm, asynchronous = ("ppo", "grpo")[number % 2], number // 2 % 2 == 1
    model = architecture(rng.choice(("qwen3-1.7b", "qwen3-4b", "qwen3-8b")))
    mean = rng.choice((256, 512, 1024))
    response = rng.choice(
        (
            Lengths(mean, mean),
            Lengths(mean, mean * 3 // 2, "uniform"),
            Lengths(mean, mean * 4, "lognormal"),
            Lengths(mean, mean * 4, "lognormal", 0.6),
            _short_or_long(mean),
        )
    )
    return Workload(
        algorithm=algorithm,
        mode="async" if asynchronous else "sync",
        max_staleness=rng.choice((1, 2, 4)) if asynchronous else 0,
        samples=rng.choice((64, 128, 256)),
        samples_per_prompt=8,
        prompt_tokens=rng.choice((256, 1024)),
        response=response,
        optimizer_steps_per_iteration=rng.choice((1, 2, 4)),
        actor=model,
        critic=model if algorithm == "ppo" else None,
        reference=model,
        reward=model if rng.random() < 0.5 else None,
        kl_in_reward=number // 16 % 2 == 1,
    )


def _short_or_long(mean: int) -> Lengths:
    """Return measured-like lengths: three of four answers are short, the others three times the mean."""
    short = [mean // 3 + mean * step // 300 - mean // 6 for step in range(100)]
    return empirical([*short * 3, *(3 * mean + mean * step // 100 - mean // 2 for step in range(100))], 4 * mean)


def _plan(problem: Problem, rng: random.Random) -> Plan | None:
    """Return the plan of a random grouping on random devices; None where a few draws are infeasible.

    The tasks' own choices are drawn, too, and changed a few hundred times for the better.
    """
    space = Space(problem)
    evaluator = Evaluator(space)
    groupings = list(set_partitions(problem.workload.tasks))
    for _ in range(20):
        grouping = rng.choice(groupings)
        allotments = _allotments(space, grouping, rng)
        x = _settled(evaluator, grouping, allotments, rng)
        if evaluator.parts(x)[0] < float("inf"):
            return evaluator.assemble(x, Made("random", 0, {}))
    return None


def _settled(
    evaluator: Evaluator, grouping: Grouping, allotments: tuple[Allotment, ...], rng: random.Random
) -> npt.NDArray[np.int32]:
    """Return the best of a random walk over the tasks' choices, with groups and devices as they are."""
    tasks = evaluator.space.problem.workload.tasks
    first = sorted(range(len(grouping)), key=lambda g: min(tasks.index(name) for name in grouping[g]))
    group = [next(i for i, g in enumerate(first) if name in grouping[g]) for name in tasks]
    fixed = np.zeros(len(tasks) * (1 + len(evaluator.space.sizes)), np.int32)
    fixed[: len(tasks)] = group
    for i, g in enumerate(first):
        fixed[len(tasks) + i * len(allotments[g]) :][: len(allotments[g])] = allotments[g]

    def with_devices(x: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        x[: fixed.size] = fixed
        evaluator.repair(x)
        return x

    best = with_devices(evaluator.random(rng.randrange(2**31), group))
    for _ in range(CHANGES):
        child = with_devices(evaluator.mutate(best, rng.randrange(2**31)))
        best = child if evaluator.graded(child) <= evaluator.graded(best) else best
    return best


def _allotments(space: Space, grouping: Grouping, rng: random.Random) -> tuple[Allotment, ...]:
    """Give each node, or each half of it, to a random group; one in eight stays idle."""
    rows = [[0] * len(space.sizes) for _ in grouping]
    for kind, nodes in enumerate(space.nodes):
        for node in nodes:
            halves = rng.choice((1, 2)) if len(node) > 1 else 1
            for _ in range(halves):
                if rng.random() > 1 / 8:
                    rng.choice(rows)[kind] += len(node) // halves
    return tuple(tuple(row) for row in rows)


def _varied(plan: Plan, problem: Problem, rng: random.Random) -> Plan:
    """Return the plan with a few settings drawn anew wherever it stays legal: searched plans are all alike."""
    for name, task in plan.tasks.items():
        changes = (
            {"micro_batch": max(task.micro_batch // 2, 1)},
            {"micro_batch": task.micro_batch * 2},
            {"recompute": rng.choice(RECOMPUTES)},
            {"optimizer_sharding": rng.choice(("none", "data_parallel"))},
            {"gradient_dtype": rng.choice(("fp32", "bf16"))},
        )
        plan = _legal(plan, name, replace(task, **rng.choice(changes)), problem) if task.engine == "megatron" else plan
    return with_prediction(plan, problem.model)


def _legal(plan: Plan, name: str, task: TaskPlan, problem: Problem) -> Plan:
    changed = with_prediction(replace(plan, tasks={**plan.tasks, name: task}), problem.model)
    return plan if violations(changed, problem.model) else changed
