"""The compiled evaluation against the cost model: what it says of a vector is what `predict` says of its plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.check import violations
from hetrl.cost.efficiency import calibrated
from hetrl.hardware import Node, Site, Topology
from hetrl.problem import Problem
from hetrl.search.core.functions import mutate, regroup, value
from hetrl.search.core.workspace import VALUED, seeded
from hetrl.search.evaluate import Evaluator
from hetrl.search.space import Space
from hetrl.workload import Workload
from tests.search.search_cases import MADE, feasible, job, jobs, seeds, topologies


@settings(max_examples=60)
@given(topologies(), jobs, seeds)
def test_seconds_are_those_that_the_cost_model_predicts(topology: Topology, workload: Workload, seed: int) -> None:
    evaluator = Evaluator(Space(Problem(topology, workload)))
    x = feasible(evaluator, seed)
    seconds, parts = evaluator.parts(x)
    told = dict(zip(workload.tasks, parts.seconds.tolist(), strict=True))
    plan = evaluator.assemble(x, MADE)
    assert violations(plan, evaluator.space.problem.model) == []
    assert plan.predicted.iteration_seconds == pytest.approx(seconds, rel=1e-9)
    if len([group for group in plan.groups if "training" in "".join(group.tasks)]) == 1:  # else they may share links
        assert told == pytest.approx({name: plan.predicted.tasks[name] for name in workload.tasks}, rel=1e-9)


def test_a_vector_of_another_problem_is_refused() -> None:
    """As what a search finds that may value nothing: a vector of no numbers."""
    l4s = Topology((Site("alpha", (Node("alpha-0", "l4", 2),)),))
    evaluator = Evaluator(Space(Problem(l4s, job(algorithm="grpo"))))
    with pytest.raises(ValueError, match=r"a vector of 0 numbers; those of this problem have \d+"):
        evaluator.parts(np.zeros(0, np.int32))


@settings(max_examples=60)
@given(topologies(), jobs, seeds)
def test_memory_is_never_less_than_what_the_plan_needs(topology: Topology, workload: Workload, seed: int) -> None:
    evaluator = Evaluator(Space(Problem(topology, workload)))
    x = feasible(evaluator, seed)
    parts = evaluator.parts(x)[1]
    resident, peak, runs = parts.resident_gb.copy(), parts.peak_gb.copy(), parts.runs.copy()
    plan = evaluator.assemble(x, MADE)
    kind_of = {d.id: k for k, nodes in enumerate(evaluator.space.nodes) for node in nodes for d in node}
    for group in plan.groups:
        tasks = [workload.tasks.index(name) for name in group.tasks]
        for kind in {kind_of[device] for device in group.devices}:
            here = [task for task in tasks if runs[task, kind]]
            bound = max(peak[t, kind] + sum(resident[u, kind] for u in here if u != t) for t in here)
            needed = max(plan.predicted.peak_memory_gb[d] for d in group.devices if kind_of[d] == kind)
            assert (
                needed
                <= bound * (1 + 1e-9)
                <= calibrated().rates(evaluator.space.classes[kind].gpu).usable_gb * (1 + 2e-9)
            )
            if len(here) == 1:
                assert needed == pytest.approx(bound, rel=1e-9)


@settings(max_examples=60)
@given(topologies(), jobs, seeds)
def test_what_a_change_did_not_touch_need_not_be_valued_again(
    topology: Topology, workload: Workload, seed: int
) -> None:
    evaluator = Evaluator(Space(Problem(topology, workload)))
    x = evaluator.random(seed)
    evaluator.graded(x)
    state, tables = seeded(seed), evaluator.bench.pointers[0]
    for change in [mutate, regroup] * 10:
        stale = np.zeros(len(workload.tasks), np.bool_)
        change(x, stale, state, tables)
        repaired = x.copy()
        evaluator.repair(repaired)
        assert np.array_equal(x, repaired)
        while (row := value(x, stale, *evaluator.bench.pointers)) != VALUED:
            evaluator.rows.fill(evaluator.tables.serving, row)
        incremental = float(evaluator.bench.room.result[0])
        parts = evaluator.bench.parts.floats.copy()
        assert incremental == evaluator.graded(x)
        assert np.array_equal(parts, evaluator.bench.parts.floats)


@settings(max_examples=100)
@given(st.data(), seeds)
def test_any_vector_is_repaired_once_and_for_all(data: st.DataObject, seed: int) -> None:
    topology = data.draw(topologies())
    evaluator = Evaluator(Space(Problem(topology, job())))
    genes = st.integers(-3, 40)
    x = np.array(data.draw(st.lists(genes, min_size=evaluator.size, max_size=evaluator.size)), np.int32)
    evaluator.repair(x)
    again = x.copy()
    evaluator.repair(again)
    assert np.array_equal(x, again)
    low, high = evaluator.bounds
    assert (low <= x).all() and (x <= high).all()
    drawn = evaluator.random(seed)
    again = drawn.copy()
    evaluator.repair(again)
    assert np.array_equal(drawn, again)
    changed = evaluator.mutate(drawn, seed)
    again = changed.copy()
    evaluator.repair(again)
    assert np.array_equal(changed, again)


@settings(max_examples=30)
@given(topologies(), jobs, seeds)
def test_names_and_order_of_equal_nodes_do_not_matter(topology: Topology, workload: Workload, seed: int) -> None:
    def renamed(site: Site) -> Site:
        return replace(site, nodes=tuple(replace(node, name=f"other-{node.name}") for node in site.nodes))

    other = Topology(tuple(map(renamed, topology.sites)), topology.links)
    evaluators = [Evaluator(Space(Problem(some, workload))) for some in (topology, other)]
    x = feasible(evaluators[0], seed)
    assert evaluators[0].parts(x)[0] == evaluators[1].parts(x)[0]
    plans = [evaluator.assemble(x, MADE) for evaluator in evaluators]
    assert plans[0].predicted.iteration_seconds == plans[1].predicted.iteration_seconds


def test_a_plan_that_is_met_again_does_not_count() -> None:
    topology = Topology((Site("a", (Node("n", "a100-80gb", 4),)),))
    evaluator = Evaluator(Space(Problem(topology, job(algorithm="grpo"))))
    x = evaluator.random(1)
    evaluator.values(np.stack([x, x, evaluator.random(2)]))
    assert evaluator.evaluations == 2


def test_work_per_plan_grows_with_classes_and_not_with_gpus() -> None:
    sizes = []
    for nodes in (2, 512):
        topology = Topology((Site("a", tuple(Node(f"n{index}", "a100-80gb", 8) for index in range(nodes))),))
        evaluator = Evaluator(Space(Problem(topology, job())))
        sizes.append((evaluator.size, evaluator.bench.parts.floats.size, evaluator.bench.room.cohorts.kind.shape))
    assert sizes[0] == sizes[1]
