"""A search in several processes: the same plan under the same seed, the best of all, an end that leaves nobody."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace

import pytest

from hetrl.cost.check import check
from hetrl.cost.efficiency import calibrated
from hetrl.errors import HetrlError, UsageError
from hetrl.plan.plan import Plan
from hetrl.search import Problem, Progress, sha_ea, solve
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Limits
from hetrl.search.processes import search_apart
from hetrl.search.space import Space
from tests.plan.plan_cases import topology, workload

PROBLEM = Problem(topology(), workload())
EVALUATIONS = 3000


def planned(processes: int, evaluations: int, seed: int = 3) -> Plan:
    plan = solve(PROBLEM, "sha-ea", 600.0, seed, evaluations=evaluations, processes=processes)
    check(plan, PROBLEM.model)
    return replace(plan, solver=replace(plan.solver, seconds=0.0))


def test_processes_share_the_evaluations_and_repeat_under_their_seed() -> None:
    first, second = planned(2, 2 * EVALUATIONS), planned(2, 2 * EVALUATIONS)
    assert first == second
    assert first.solver.evaluations == 2 * EVALUATIONS
    # The first process draws as one alone does.
    assert first.predicted.iteration_seconds <= planned(1, EVALUATIONS).predicted.iteration_seconds


def test_processes_predict_with_the_efficiencies_of_the_problem() -> None:
    slow = calibrated().with_measured({gpu: {"decode": 0.1, "training": 0.1} for gpu in ("a100-40gb", "l40s", "l4")})
    evaluator = Evaluator(Space(replace(PROBLEM, efficiencies=slow)))
    best, compared = search_apart(sha_ea.search, evaluator, Limits(time.monotonic() + 600, EVALUATIONS), 0, 2)
    assert compared == EVALUATIONS
    assert best.seconds == pytest.approx(evaluator.iteration_seconds(best.x), rel=1e-12)


def test_an_interrupt_stops_all_processes_and_keeps_the_best() -> None:
    told: list[Progress] = []
    before = set(multiprocessing.active_children())

    def interrupt(progress: Progress) -> None:
        told.append(progress)
        if progress.seconds < float("inf"):
            raise KeyboardInterrupt

    plan = solve(PROBLEM, "sha-ea", 3600.0, 0, report=interrupt, processes=2)
    check(plan, PROBLEM.model)
    assert plan.predicted.iteration_seconds <= told[-1].seconds * (1 + 1e-9)
    assert set(multiprocessing.active_children()) <= before


def test_a_process_that_is_killed_is_told() -> None:
    before = set(multiprocessing.active_children())  # of other tests' pools

    def kill(progress: Progress) -> None:
        (set(multiprocessing.active_children()) - before).pop().kill()

    with pytest.raises(HetrlError, match=r"was killed.*take fewer planner\.processes"):
        solve(PROBLEM, "sha-ea", 3600.0, 0, report=kill, processes=2)
    assert set(multiprocessing.active_children()) <= before


def test_other_solvers_have_one_process() -> None:
    with pytest.raises(UsageError, match="only sha-ea searches in several processes"):
        solve(PROBLEM, "ilp", 1.0, 0, processes=2)
