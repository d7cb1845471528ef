from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hetrl.cost.check import check
from hetrl.errors import InfeasibleError
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.problem import Problem
from hetrl.search import solve
from hetrl.search.assemble import Made
from hetrl.search.evaluate import Evaluator
from hetrl.search.ilp.columns import make_columns
from hetrl.search.ilp.model import composed_seconds, solve_program
from hetrl.search.ilp.options import read_menu
from hetrl.search.ilp.solver import Outcome, best_in_space
from hetrl.search.limits import Limits
from hetrl.search.sha_ea import search
from hetrl.search.space import Space, linked_sets
from tests.search.ilp_cases import BruteForce, problem, trimmed, workload

JOBS = [("grpo", "sync"), ("grpo", "async"), ("ppo", "sync"), ("ppo", "async")]
MODES = [(algorithm, mode, seed) for algorithm, mode in JOBS for seed in range(13)]
NEVER = math.inf
EVALUATIONS = 50_000  # at most half a second of sha-ea


@cache
def _solved(asked: Problem, seed: int = 0) -> tuple[Evaluator, float, Outcome]:
    """Return the evaluator, the seconds that sha-ea came to in the same space, and what the program found.

    `seed` is sha-ea's: some of the problems are the same one.
    """
    evaluator = Evaluator(Space(asked), narrow=True)
    start = search(evaluator, Limits(NEVER, EVALUATIONS), seed)
    return evaluator, start.seconds, best_in_space(evaluator, start.x, start.seconds, NEVER)


@pytest.mark.parametrize(("algorithm", "mode", "seed"), MODES)
def test_program_agrees_with_brute_force(algorithm: str, mode: str, seed: int) -> None:
    evaluator = Evaluator(Space(problem(seed, algorithm, mode)), narrow=True)
    tables = evaluator.tables
    menu = trimmed(read_menu(evaluator, 1e6, NEVER), seed, most=2)
    best = BruteForce(menu, tables).least_seconds()
    limit = 1.2 * best if math.isfinite(best) else 1e6
    columns = make_columns(menu, tables, limit, NEVER)
    found = solve_program(columns, menu, tables, limit, NEVER)
    assert found.proven
    assert bool(found.columns) == math.isfinite(best)
    if found.columns:
        chosen = [*found.columns]
        value = composed_seconds(columns.numbers[chosen], columns.tasks[chosen], tables)
        assert value == pytest.approx(best, rel=1e-5)
        assert found.bound == pytest.approx(best, rel=1e-5)
        nothing = solve_program(make_columns(menu, tables, 0.99 * best, NEVER), menu, tables, 0.99 * best, NEVER)
        assert nothing.proven and not nothing.columns


@pytest.mark.parametrize(("algorithm", "seed"), [(a, s) for a in ("grpo", "ppo") for s in range(6)])
def test_constants_make_up_the_full_model_in_mode_sync(algorithm: str, seed: int) -> None:
    _, _, found = _solved(problem(seed, algorithm, "sync"))
    assert found.proven
    if math.isfinite(found.composed):
        assert found.seconds == pytest.approx(found.composed, rel=1e-3)


def test_sha_ea_finds_nearly_every_optimum_of_the_space() -> None:
    met = []
    for algorithm, mode, seed in MODES[::4]:
        _, seconds, found = _solved(problem(seed, algorithm, mode), seed)
        assert found.proven
        met.append(seconds <= found.seconds * 1.01)
    assert np.mean(met) >= 0.95


@settings(max_examples=8)
@given(st.integers(0, 11), st.sampled_from(JOBS))
def test_every_plan_passes_check(seed: int, job: tuple[str, str]) -> None:
    asked = problem(seed, *job)
    evaluator, _, found = _solved(asked)
    plan = evaluator.assemble(found.x, Made("ilp", 0, {}))
    check(plan, asked.model)
    assert plan.predicted.iteration_seconds == pytest.approx(found.seconds)


@settings(max_examples=6)
@given(st.integers(0, 11), st.sampled_from(["l40s", "a100-80gb"]))
def test_one_more_gpu_never_makes_an_optimum_worse(seed: int, gpu: str) -> None:
    asked = problem(seed, "grpo", "sync")
    topology = asked.topology
    more = (*topology.sites, Site("more", (Node("n0", gpu, 1, nic_gbps=100.0),)))
    links = (*topology.links, *(Link((site.name, "more"), 5.0, 5.0) for site in topology.sites))
    before, after = _solved(asked)[2], _solved(replace(asked, topology=Topology(more, links)))[2]
    assert before.proven and after.proven
    assert after.bound <= before.bound * (1 + 1e-4)


@settings(max_examples=4)
@given(st.permutations(["a", "b", "c"]))
def test_equal_nodes_may_change_places(names: list[str]) -> None:
    nodes = tuple(Node(name, "a100-80gb", 1) for name in names)
    sites = (Site("east", nodes), Site("west", (Node("n0", "l40s", 1),)))
    topology = Topology(sites, (Link(("east", "west"), 10.0, 5.0),))
    ordered = replace(topology, sites=(replace(sites[0], nodes=tuple(sorted(nodes, key=lambda n: n.name))), sites[1]))
    found = [_solved(Problem(some, workload("grpo", "sync")))[2].seconds for some in (topology, ordered)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_solver_reports_status_and_bound() -> None:
    plan = solve(problem(3, "grpo", "sync"), "ilp", 60.0, 0)
    assert plan.solver.status == "optimal"
    assert plan.solver.bound_seconds == pytest.approx(plan.predicted.iteration_seconds, rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_sha_ea_kept_to_the_space_stays_above_the_bound(seed: int) -> None:
    asked = problem(seed, "grpo", "sync")
    plan = solve(asked, "sha-ea", 600.0, 0, evaluations=20_000, narrow=True)
    assert _solved(asked)[2].bound <= plan.predicted.iteration_seconds * (1 + 1e-3)


def test_without_time_the_plan_of_sha_ea_is_returned_unproven() -> None:
    evaluator = Evaluator(Space(problem(3, "grpo", "sync")), narrow=True)
    start = search(evaluator, Limits(NEVER, EVALUATIONS), 0)
    found = best_in_space(evaluator, start.x, start.seconds, -NEVER)
    assert (found.seconds, found.bound, found.proven) == (start.seconds, 0.0, False)


def test_where_the_time_was_too_short_the_error_says_so() -> None:
    with pytest.raises(InfeasibleError, match=r"within 0 s; 0 were compared.*raise planner\.budget_seconds"):
        solve(problem(3, "grpo", "sync"), "ilp", 0.0, 0)


def test_an_interrupt_returns_the_plan_of_sha_ea_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = tuple(Site(name, (Node("n0", "a100-80gb", 2),)) for name in "ab")
    asked = Problem(Topology(sites, ()), workload("grpo", "sync"))
    began = []

    def interrupt(*_: object) -> None:
        began.append(True)
        raise KeyboardInterrupt

    monkeypatch.setattr("hetrl.search.ilp.solver.make_columns", interrupt)
    plan = solve(asked, "ilp", 20.0, 0)
    check(plan, asked.model)
    assert (plan.solver.status, plan.solver.bound_seconds) == ("feasible", None)
    assert len(began) == 1  # the other site is not looked at


def test_sets_of_sites_are_linked_and_cannot_grow() -> None:
    sites = tuple(Site(name, (Node("n0", "l4", 1),)) for name in "abcd")
    links = tuple(Link((a, b), 5.0, 1.0) for a, b in ("ab", "bc", "ac", "cd"))
    assert set(linked_sets(Topology(sites, links))) == {frozenset("abc"), frozenset("cd")}
