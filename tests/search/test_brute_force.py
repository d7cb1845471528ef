"""Searches against the best of all legal plans of tiny problems; `brute_force` lists them without the encoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hetrl.cost.check import check
from hetrl.hardware import Link, Node, Site, Topology
from hetrl.lengths import Lengths
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search import solve
from hetrl.workload import Workload, architecture
from tests.search.brute_force import BruteForce

EVALUATIONS = 200_000
NEAR = 0.005  # relative
EXACT = 1e-9


def _topology(pair: str, single: str, delay_ms: float, gbps: float) -> Topology:
    """Two GPUs of one type in a node, one of another type at another site."""
    sites = Site("a", (Node("n0", pair, 2),)), Site("b", (Node("n0", single, 1),))
    return Topology(sites, (Link(("a", "b"), delay_ms, gbps),))


def _workload(model: str, layers: int, prompt_tokens: int, response: Lengths) -> Workload:
    """GRPO without reference and reward model: four prompts of two samples, a few layers, a small vocabulary."""
    return Workload(
        algorithm="grpo",
        mode="sync",
        max_staleness=0,
        samples=8,
        samples_per_prompt=2,
        prompt_tokens=prompt_tokens,
        response=response,
        optimizer_steps_per_iteration=2,
        actor=replace(architecture(model), name="few-layers", layers=layers, vocabulary=32_000),
    )


JOBS = {
    "near": (  # pipelines over both sites
        _topology("h20", "l40s", 1.0, 50.0),
        _workload("qwen3-4b", 6, 3500, Lengths(32, 64, "uniform")),
    ),
    "slow link": (
        _topology("a100-40gb", "l40s", 20.0, 0.5),
        _workload("qwen3-1.7b", 6, 1536, Lengths(256, 512, "lognormal")),
    ),
    "unequal": (  # and little memory
        _topology("l4", "a100-40gb", 5.0, 5.0),
        _workload("qwen3-8b", 8, 1536, Lengths(256, 512, "uniform")),
    ),
    "fixed lengths": (
        _topology("l40s", "h100", 5.0, 0.5),
        _workload("qwen3-1.7b", 6, 512, Lengths(512, 512)),
    ),
}
CASES = [(name, mode) for name in JOBS for mode in ("sync", "async")]


def _problem(name: str, mode: str) -> Problem:
    topology, workload = JOBS[name]
    return Problem(topology, replace(workload, mode=mode, max_staleness=int(mode == "async")))


@cache
def _best(name: str, mode: str) -> tuple[Plan, float]:
    """Return the best of all plans, and the seconds that it was chosen for."""
    tried = BruteForce(_problem(name, mode))
    return tried.optimum(), tried.seconds


def _excess(plan: Plan, name: str, mode: str) -> float:
    """Return by what share a plan takes longer than the best of all."""
    return plan.predicted.iteration_seconds / _best(name, mode)[1] - 1


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_best_of_all_plans_is_legal_and_valued_as_predicted(name: str, mode: str) -> None:
    plan, seconds = _best(name, mode)
    check(plan, _problem(name, mode).model)
    assert plan.predicted.iteration_seconds == pytest.approx(seconds, rel=EXACT)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_sha_ea_finds_the_best_of_all_plans(name: str, mode: str, seed: int) -> None:
    plan = solve(_problem(name, mode), "sha-ea", 600.0, seed, evaluations=EVALUATIONS)
    assert -EXACT <= _excess(plan, name, mode) <= NEAR


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_ilp_finds_the_best_of_all_plans(name: str, mode: str) -> None:
    plan = solve(_problem(name, mode), "ilp", 60.0, 0)
    assert _excess(plan, name, mode) == pytest.approx(0.0, abs=EXACT)
