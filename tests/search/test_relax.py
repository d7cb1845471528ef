"""What full recomputation computes again: no layer more than the devices' memory asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetrl.cost.check import PlanError, check, violations
from hetrl.cost.iteration import with_prediction
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.plan.plan import Plan, Stage
from hetrl.problem import Problem
from hetrl.search import solve
from hetrl.search.relax import relax_recomputation
from hetrl.workload import ACTOR_TRAINING, Workload, architecture

A100 = Node("a100-0", "a100-40gb", 4)
L4 = Node("l4-0", "l4", 4)
TOPOLOGY = Topology((Site("alps", (A100,)), Site("lab", (L4,))), (Link(("alps", "lab"), 10.0, 5.0),))
ACTOR = architecture("qwen3-1.7b")
LONG = Lengths(3840, 3840)
PROBLEM = Problem(TOPOLOGY, Workload("grpo", "sync", 0, 64, 8, 256, LONG, 1, actor=ACTOR, reference=ACTOR))


def stages_of(plan: Plan) -> list[tuple[int, int, Stage]]:
    """Every stage of the training with its replica and its place."""
    replicas = plan.tasks[ACTOR_TRAINING].replicas
    return [(r, i, stage) for r, replica in enumerate(replicas) for i, stage in enumerate(replica.stages)]


def with_layers(plan: Plan, r: int, i: int, count: int | None) -> Plan:
    task = plan.tasks[ACTOR_TRAINING]
    replicas = list(task.replicas)
    stages = list(replicas[r].stages)
    stages[i] = replace(stages[i], recompute_layers=count)
    replicas[r] = replace(replicas[r], stages=tuple(stages))
    tasks = {**plan.tasks, ACTOR_TRAINING: replace(task, replicas=tuple(replicas))}
    return with_prediction(replace(plan, tasks=tasks), PROBLEM.model)


@pytest.fixture(scope="module")
def whole() -> Plan:
    """A plan that recomputes whole stages, and has to for some of their layers."""
    return next(plan for plan in map(wholly_recomputed, range(20)) if needs_it(plan))


def needs_it(plan: Plan) -> bool:
    task = replace(plan.tasks[ACTOR_TRAINING], recompute="none")
    return bool(violations(replace(plan, tasks={**plan.tasks, ACTOR_TRAINING: task}), PROBLEM.model))


def wholly_recomputed(seed: int) -> Plan:
    plan = solve(PROBLEM, "sha-ea", 60.0, seed, evaluations=500)
    for r, i, _ in stages_of(plan):
        plan = with_layers(plan, r, i, None)
    task = replace(plan.tasks[ACTOR_TRAINING], recompute="full")
    plan = with_prediction(replace(plan, tasks={**plan.tasks, ACTOR_TRAINING: task}), PROBLEM.model)
    check(plan, PROBLEM.model)
    return plan


def test_as_few_layers_as_fit_are_computed_again(whole: Plan) -> None:
    relaxed = relax_recomputation(whole, PROBLEM.model)
    check(relaxed, PROBLEM.model)
    assert relaxed.tasks[ACTOR_TRAINING].recompute == "full"
    assert relaxed.predicted.iteration_seconds < whole.predicted.iteration_seconds
    for r, i, stage in stages_of(relaxed):
        layers = stage.layers[1] - stage.layers[0]
        count = layers if stage.recompute_layers is None else stage.recompute_layers
        assert 0 <= count <= layers
        if count > 0:
            with pytest.raises(PlanError, match="needs .* GB; usable are"):
                check(with_layers(relaxed, r, i, count - 1), PROBLEM.model)


def test_what_fits_without_is_not_recomputed_at_all(whole: Plan) -> None:
    short = replace(PROBLEM, workload=replace(PROBLEM.workload, response=Lengths(128, 128)))
    task = replace(whole.tasks[ACTOR_TRAINING], micro_batch=1)
    relaxed = relax_recomputation(replace(whole, tasks={**whole.tasks, ACTOR_TRAINING: task}), short.model)
    assert relaxed.tasks[ACTOR_TRAINING].recompute == "none"
    assert all(stage.recompute_layers is None for _, _, stage in stages_of(relaxed))


def test_a_plan_without_full_recomputation_is_left_alone(whole: Plan) -> None:
    task = replace(whole.tasks[ACTOR_TRAINING], recompute="selective")
    plan = replace(whole, tasks={**whole.tasks, ACTOR_TRAINING: task})
    assert relax_recomputation(plan, PROBLEM.model) is plan
