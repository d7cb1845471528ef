"""Whether trainings cross sites: only where that pays at the measured links and at worse ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from hetrl.cost.check import violations
from hetrl.cost.iteration import with_prediction
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search import solve
from hetrl.search.evaluate import Evaluator
from hetrl.search.robust import LEAST_GAIN, chosen, crosses, least_gain, may_cross, with_worse_links
from hetrl.search.space import Space
from hetrl.workload import Workload
from tests.search.search_cases import MADE, feasible, job, jobs, seeds, topologies

EVALUATIONS = 6000
RATES = (0.3, 1.0, 2.0, 3.0, 5.0, 10.0, 40.0)  # Gbps; from where crossing does not pay to where it does


def _problem(gbps: float) -> Problem:
    """Two equal sites, of which one generates."""
    nodes = (Node("n0", "a100-80gb", 4, host_memory_gb=1024.0),)
    sites = (Site("a", nodes), Site("b", nodes, engines=("megatron",)))
    workload = replace(job("qwen3-1.7b", "grpo", steps=1), samples=2048)
    return Problem(Topology(sites, (Link(("a", "b"), 1.0, gbps),)), workload)


@settings(max_examples=20)
@given(topologies(), jobs, seeds)
def test_at_home_no_training_spans_sites(topology: Topology, workload: Workload, seed: int) -> None:
    problem = Problem(topology, workload)
    evaluator = Evaluator(Space(problem, home=True))
    plan = evaluator.assemble(feasible(evaluator, seed), MADE)
    assert not crosses(plan)
    assert not violations(plan, problem.model)


def test_what_is_chosen_gains_enough_at_the_measured_and_at_the_worse_links() -> None:
    share, taken = 0.3, set()
    made = [_solved(_problem(40.0), home=home) for home in (False, True)]
    assert [crosses(plan) for plan in made] == [True, False]
    for gbps in RATES:
        problem = _problem(gbps)
        anywhere, home = (_again(plan, problem) for plan in made)
        found = chosen(anywhere, home, problem, share)
        worse = _problem(gbps * (1 - share))
        gains = [
            _again(home, one).predicted.iteration_seconds / _seconds(anywhere, one) - 1 for one in (problem, worse)
        ]
        assert least_gain(anywhere, home, problem, share) == pytest.approx(min(gains))
        assert found is (anywhere if min(gains) >= LEAST_GAIN else home)
        taken.add(crosses(found))
    assert taken == {True, False}


def test_a_search_that_is_robust_stays_at_home_where_crossing_gains_too_little() -> None:
    for gbps, expected in ((0.3, False), (40.0, True)):
        plan = solve(_problem(gbps), "sha-ea", 600.0, 0, evaluations=EVALUATIONS, robust=0.3)
        assert crosses(plan) == expected
        assert plan.solver.evaluations <= EVALUATIONS


def test_sites_without_a_link_or_without_a_training_engine_are_not_crossed() -> None:
    problem = _problem(1.0)
    assert may_cross(Space(problem))
    assert not may_cross(Space(problem, sites=frozenset({"a"})))
    assert not may_cross(Space(Problem(Topology(problem.topology.sites), problem.workload)))


def test_worse_links_give_less_of_everything() -> None:
    (link,) = with_worse_links(_problem(10.0).topology, 0.3).links
    assert link.gbps == pytest.approx(7.0)


def _solved(problem: Problem, home: bool) -> Plan:
    return solve(problem, "sha-ea", 600.0, 0, evaluations=EVALUATIONS, home=home)


def _again(plan: Plan, problem: Problem) -> Plan:
    return with_prediction(plan, problem.model)


def _seconds(plan: Plan, problem: Problem) -> float:
    return _again(plan, problem).predicted.iteration_seconds
