"""The searches among the baselines: random plans, and evolution with the DEAP library."""

from __future__ import annotations

import random
import sys
from functools import cache
from math import inf

import numpy as np
import pytest

from hetrl.cost.check import check
from hetrl.errors import InfeasibleError, UsageError
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.search import Problem, Progress, solve
from hetrl.search.assemble import Made
from hetrl.search.baselines import PLANS, SEARCHES, deap_ea, random_plans
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Best, Limits
from hetrl.search.space import Space
from hetrl.workload import Lengths, Workload, architecture

METHODS = {"random": random_plans.search, "deap": deap_ea.search}
EVALUATIONS = 2000


def problem(mode: str = "sync") -> Problem:
    sites = (Site("a", (Node("n0", "a100-80gb", 4),)), Site("b", (Node("n0", "l40s", 4),)))
    size = architecture("qwen3-1.7b")
    job = Workload("grpo", mode, int(mode == "async"), 64, 8, 256, Lengths(256, 256), 2, size, reference=size)
    return Problem(Topology(sites, (Link(("a", "b"), 5.0, 5.0),)), job)


@cache
def evaluator_of(mode: str) -> Evaluator:
    return Evaluator(Space(problem(mode)))


def searched(name: str, seed: int, evaluations: int = EVALUATIONS, mode: str = "sync") -> tuple[Best, list[Progress]]:
    """Search from an evaluator that has met nothing yet."""
    reports: list[Progress] = []
    found = METHODS[name](Evaluator(Space(problem(mode))), Limits(inf, evaluations), seed, reports.append)
    return found, reports


def test_the_searches_are_baselines() -> None:
    assert set(METHODS) == set(SEARCHES) <= set(PLANS)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_same_seed_gives_the_same_plan_and_another_one_another(name: str, mode: str) -> None:
    first, again, other = (searched(name, seed, mode=mode)[0] for seed in (3, 3, 4))
    assert first.seconds == again.seconds < inf
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.x, other.x)


@pytest.mark.parametrize("name", SEARCHES)
def test_what_is_found_is_what_the_evaluator_says_and_reports_only_get_better(name: str) -> None:
    found, reports = searched(name, 0)
    assert evaluator_of("sync").graded(found.x) == found.seconds == reports[-1].seconds
    seconds, evaluations = ([getattr(one, key) for one in reports] for key in ("seconds", "evaluations"))
    assert seconds == sorted(seconds, reverse=True)
    assert evaluations == sorted(evaluations)
    assert EVALUATIONS <= evaluations[-1] < 2 * EVALUATIONS


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_plan_passes_check(name: str, mode: str) -> None:
    asked = problem(mode)
    plan, compared = PLANS[name](Space(asked), 3600.0, Made(name, 0, {}), evaluations=EVALUATIONS)
    check(plan, asked.model)
    assert compared >= EVALUATIONS
    assert plan.solver.name == name


def test_evolution_finds_better_plans_than_chance() -> None:
    evolved, drawn = (searched(name, 1, 4 * EVALUATIONS)[0] for name in ("deap", "random"))
    assert evolved.seconds < drawn.seconds


def test_deap_leaves_pythons_own_generator_as_it_was() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    searched("deap", 0, 500)
    assert random.random() == expected


def test_without_deap_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "deap"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "deap", None)
    with pytest.raises(UsageError, match="pip install deap==1.4.3"):
        solve(problem(), "deap", 1.0, 0)


@pytest.mark.parametrize("name", SEARCHES)
def test_where_no_plan_is_found_the_error_says_what_to_do(name: str) -> None:
    with pytest.raises(InfeasibleError, match=r"within 0 s; 0 were compared.*raise planner\.budget_seconds"):
        solve(problem(), name, 0.0, 0)


@pytest.mark.parametrize("name", SEARCHES)
def test_an_interrupt_keeps_what_was_found(name: str) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.seconds < inf:
            raise KeyboardInterrupt

    found = METHODS[name](Evaluator(Space(problem())), Limits(inf), 0, interrupt)
    assert found.seconds < inf and found.interrupted
