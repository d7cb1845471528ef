"""The last step of a search: what single changes find, and that layers and senders are the search's to choose."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from hetrl.hardware import Link, Node, Site, Topology
from hetrl.problem import Problem
from hetrl.search.core.encoding import (
    IDLE,
    MOVED,
    OFFLOAD,
    PIPELINE,
    RESIDENT,
    SENDER,
    SHAPE,
    SLEEP,
    TENSOR,
    USED,
    Vector,
    views,
)
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Best, Limits
from hetrl.search.polish import changes, polish
from hetrl.search.space import Space
from hetrl.workload import ACTOR_TRAINING, Workload
from tests.search.search_cases import MADE, feasible, job, jobs, seeds, topologies

WITHOUT_END = Limits(time.monotonic() + 1e6)


def offered(evaluator: Evaluator, x: Vector) -> Best:
    best = Best()
    best.offer(evaluator.graded(x), x, evaluator)
    return best


@settings(max_examples=20)
@given(topologies(), jobs, seeds)
def test_no_single_change_is_better_than_what_is_polished(topology: Topology, workload: Workload, seed: int) -> None:
    evaluator = Evaluator(Space(Problem(topology, workload)))
    best = offered(evaluator, feasible(evaluator, seed))
    before = best.value
    polish(best, evaluator, WITHOUT_END)
    assert best.value <= before
    assert best.value == pytest.approx(evaluator.graded(best.x), rel=1e-12)
    for change in changes(best.x.copy(), evaluator):
        x = best.x.copy()
        change(views(x, evaluator.tables.tasks, evaluator.tables.classes))
        evaluator.repair(x)
        assert evaluator.graded(x) >= best.value


def test_a_limit_ends_the_changes() -> None:
    evaluator = Evaluator(Space(Problem(two_sites(), job(algorithm="grpo"))))
    best = offered(evaluator, feasible(evaluator, 0))
    allowed = evaluator.evaluations + 20
    polish(best, evaluator, Limits(WITHOUT_END.deadline, allowed))
    assert evaluator.evaluations == allowed


def test_a_task_may_leave_with_some_of_the_devices() -> None:
    evaluator = Evaluator(Space(Problem(two_sites(), job(algorithm="grpo"))))
    x, tables = over_both_sites(evaluator, 2, 1), evaluator.tables
    left = []
    for change in changes(x.copy(), evaluator):
        changed = x.copy()
        group, devices, *_ = parts = views(changed, tables.tasks, tables.classes)
        change(parts)
        evaluator.repair(changed)
        if sorted(devices[:2].tolist()) == [[1, 0], [1, 2]]:
            left.append(group.tolist())
    assert len({*map(tuple, left)}) == tables.tasks


def test_a_task_joins_a_group_whose_tasks_take_turns() -> None:
    """Each change of a group is tried with all of the tasks in their places, and with all that can leaving them."""
    evaluator = Evaluator(Space(Problem(two_sites(), job(algorithm="grpo"))))
    tables = evaluator.tables
    x = over_both_sites(evaluator, 2, 1)
    views(x, tables.tasks, tables.classes)[3][:, IDLE] = RESIDENT
    idle = set()
    for change in changes(x.copy(), evaluator):
        changed = x.copy()
        group, _, _, choice = parts = views(changed, tables.tasks, tables.classes)
        change(parts)
        evaluator.repair(changed)
        if len({*group.tolist()}) == 1:
            idle.add(tuple(choice[:, IDLE].tolist()))
    turns = tuple(SLEEP if task == tables.generation else OFFLOAD for task in range(tables.tasks))
    assert {turns, (RESIDENT,) * tables.tasks} <= idle


def test_a_training_counts_the_devices_that_its_group_gets() -> None:
    evaluator = Evaluator(Space(Problem(two_sites(), job(algorithm="grpo"))))
    tables = evaluator.tables
    x = over_both_sites(evaluator, 2, 1)
    group, devices, order, choice = views(x, tables.tasks, tables.classes)
    task = evaluator.space.problem.workload.tasks.index(ACTOR_TRAINING)
    group[:] = [int(one == task) for one in range(tables.tasks)]
    devices[:2] = [[0, 2], [2, 0]]
    order[task], choice[task, USED] = [0, 1], 1
    evaluator.repair(x)
    counted = []
    for seed in range(2000):
        _, had, _, choices = views(evaluator.mutate(x, seed), tables.tasks, tables.classes)
        if had[1].tolist() == [2, 1] and np.array_equal(choices[task, :USED], choice[task, :USED]):
            counted.append(choices[task, USED] == 2)
    assert len(counted) > 20
    assert sum(counted) > len(counted) / 2  # the others were drawn anew


def two_sites(gbps: float = 0.5) -> Topology:
    sites = tuple(
        Site(name, (Node("n0", gpu, 2, nic_gbps=100.0),)) for name, gpu in (("a", "a100-80gb"), ("b", "l40s"))
    )
    return Topology(sites, (Link(("a", "b"), 10.0, gbps),))


def over_both_sites(evaluator: Evaluator, shape: int, stages: int) -> Vector:
    """Return a plan whose training has its stages, or its replicas, at both sites, beside all other tasks."""
    tables, space = evaluator.tables, evaluator.space
    x = np.zeros(evaluator.size, np.int32)
    _, devices, classes, choice = views(x, tables.tasks, tables.classes)
    devices[0] = tables.devices
    for task in range(tables.tasks):
        classes[task] = (0, 1) if tables.is_training[task] else 1
        choice[task, 6] = 1  # offloaded
    trainer = space.problem.workload.tasks.index(ACTOR_TRAINING)
    choice[trainer, [TENSOR, PIPELINE, SHAPE, USED]] = 0, stages, shape, 2
    evaluator.repair(x)
    return x


def test_layers_are_what_the_best_of_all_splits_has() -> None:
    """Over a slow link the bytes of weights and hops decide, of which the rule of equal stage times knows nothing."""
    evaluator = Evaluator(Space(Problem(two_sites(), job(algorithm="grpo", steps=1))))
    x = over_both_sites(evaluator, 0, 4)
    trainer = evaluator.tables.trainer
    choice = views(x, evaluator.tables.tasks, evaluator.tables.classes)[3]
    found = {}
    for moved in product(range(-3, 4), repeat=3):
        choice[trainer, MOVED : MOVED + 3] = moved
        found[moved] = evaluator.graded(x)
    assert min(found.values()) < found[0, 0, 0]
    choice[trainer, MOVED : MOVED + 3] = min(found, key=lambda moved: found[moved])
    plan = evaluator.assemble(x, MADE)
    spans = [stage.layers for stage in plan.tasks[ACTOR_TRAINING].replicas[0].stages]
    assert spans[0][0] == 0 and spans[-1][1] == 28
    assert plan.predicted.iteration_seconds == pytest.approx(min(found.values()), rel=1e-9)


def test_any_site_of_a_training_can_send_the_weights() -> None:
    evaluator = Evaluator(Space(Problem(two_sites(), job(algorithm="grpo", steps=1))))
    x = over_both_sites(evaluator, 2, 1)
    leads = set()
    for sender in (0, 1):
        views(x, evaluator.tables.tasks, evaluator.tables.classes)[3][evaluator.tables.trainer, SENDER] = sender
        plan = evaluator.assemble(x, MADE)
        assert plan.predicted.iteration_seconds == pytest.approx(evaluator.graded(x), rel=1e-9)
        leads.add(plan.lead_site)
    assert leads == {"a", "b"}
