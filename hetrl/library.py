"""The questions that are asked in Python, as `hetrl.solve` and its like: plan, predict, play and explain."""

from __future__ import annotations

from collections.abc import Callable

from hetrl import explanation, search, simulator
from hetrl.cost import iteration
from hetrl.plan.plan import Plan, Predicted
from hetrl.problem import Problem


def solve(
    problem: Problem,
    solver: str | None = None,
    budget_seconds: float | None = None,
    seed: int | None = None,
    *,
    evaluations: int | None = None,
    report: Callable[[search.Progress], None] | None = None,
    narrow: bool = False,
    processes: int | None = None,
    robust: float | None = None,
) -> Plan:
    """Return a plan of the problem, with its prediction, that can be run.

    What is not given is as the section `planner` of the experiment says, or its default where the problem was made in
    code. The options are those of `hetrl.search.solve`, which says what it raises.
    """
    said = problem.planner
    return search.solve(
        problem,
        said.solver if solver is None else solver,
        said.budget_seconds if budget_seconds is None else budget_seconds,
        said.seed if seed is None else seed,
        problem.digests,
        evaluations=evaluations,
        report=report,
        narrow=narrow,
        processes=said.processes if processes is None else processes,
        robust=said.robust if robust is None else robust,
    )


def predict(plan: Plan, problem: Problem) -> Predicted:
    """Return what the cost model says of a plan: seconds, memory, bytes between sites, price."""
    return iteration.predict(plan, problem.model)


def simulate(
    plan: Plan, problem: Problem, seed: int = 0, iterations: int | None = None, noise: float = 0.0
) -> simulator.Simulated:
    """Play a plan until its iterations are steady, or for so many `iterations`; the same seed gives the same play.

    With `noise` what engines take, and response lengths, are off by at most this share.
    """
    return simulator.simulate(plan, problem.model, seed, iterations, noise)


def explain(plan: Plan, problem: Problem) -> explanation.Explanation:
    """Return why a plan is as it is: what binds, what fills the memory, why GPUs are idle, why training is where it is.

    The plan must pass `check`. Takes seconds of work.
    """
    return explanation.with_choices(explanation.explain(plan, problem), problem)
