"""Find a plan for a job on a topology: `solve` with one of the registered solvers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from hetrl.cost.check import check
from hetrl.cost.objective import THROUGHPUT, Objective
from hetrl.errors import UsageError, unknown
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.search import baselines, sha_ea
from hetrl.search.assemble import Made
from hetrl.search.core.functions import library
from hetrl.search.ilp import solver as ilp_solver
from hetrl.search.infeasible import refuse_impossible
from hetrl.search.limits import Progress
from hetrl.search.relax import relax_recomputation
from hetrl.search.space import Grouping, Space

__all__ = ["SOLVERS", "Objective", "Problem", "Progress", "finished", "solve"]

Found = tuple[Plan, int]  # the plan and how many complete plans were compared


def solve(
    problem: Problem,
    solver: str,
    budget_seconds: float,
    seed: int,
    inputs: Mapping[str, str] | None = None,
    *,
    evaluations: int | None = None,
    report: Callable[[Progress], None] | None = None,
    excluded: Grouping | None = None,
    home: bool = False,
    narrow: bool = False,
    processes: int = 1,
    robust: float = 0.0,
) -> Plan:
    """Return a plan with its prediction that has passed `check`.

    `budget_seconds` bounds the search (the best so far is returned, on Ctrl-C too), `seed` fixes it; `inputs` are the
    digests that the plan records. For sha-ea: `evaluations` bounds the plans that are compared, and where this ends the
    search, the same seed gives the same plan; `report` is told how far the search is; no plan has the grouping
    `excluded`; with `home` each training stays in one site; `narrow` keeps to the plan space of the solver ilp;
    `processes` search with a seed each; where links give the share `robust` less, a training that crosses them must
    still pay (`hetrl.search.robust`). Objectives but throughput are for the searches (sha-ea, deap, random). Raises
    UsageError for a solver that is unknown or does not do what is asked, InfeasibleError where no plan can exist or
    none was found: it names the tightest constraint and the smallest remedy.
    """
    _refuse_unknown(solver, problem.objective)
    if solver != "sha-ea":
        _refuse_options(solver, narrow=narrow, evaluations=evaluations, processes=processes)
    library()  # compiled now if it is not yet: that is no search
    began = time.monotonic()
    space = Space(problem, excluded=excluded, home=home)
    refuse_impossible(space)
    made = Made(solver, seed, inputs or {})
    if solver == "sha-ea":
        plan, compared = sha_ea.plan(
            space, budget_seconds, made, evaluations, report, narrow=narrow, processes=processes, robust=robust
        )
    else:
        plan, compared = SOLVERS[solver](space, budget_seconds, made)
    took = round(time.monotonic() - began, 3)
    told = replace(plan.solver, seconds=took, evaluations=compared, objective=problem.objective.kind)
    return finished(replace(plan, solver=told), problem)


def finished(plan: Plan, problem: Problem) -> Plan:
    """Return what a solver has found as it may run: with no more recomputation than memory asks for, and checked."""
    if plan.solver.bound_seconds is None:  # it bounds plans that recompute whole stages
        plan = relax_recomputation(plan, problem.model)
    check(plan, problem.model)
    return plan


def _refuse_unknown(solver: str, objective: Objective) -> None:
    if solver not in SOLVERS:
        raise UsageError(unknown("solver", solver, sorted(SOLVERS)))
    if solver not in solvers_for(objective):
        raise UsageError(
            f'solver "{solver}" plans for {THROUGHPUT} alone; for {objective.kind} take planner.solver sha-ea'
        )


def _refuse_options(solver: str, *, narrow: bool, evaluations: int | None, processes: int) -> None:
    """Refuse what only sha-ea does, asked of another solver."""
    if narrow:
        raise UsageError(f'only sha-ea can be kept to the plan space of ilp; solver "{solver}" has its own')
    if evaluations is not None:
        raise UsageError(f'evaluations bound sha-ea alone; solver "{solver}" has none, or bounds them itself')
    if processes > 1:
        raise UsageError(f'only sha-ea searches in several processes; solver "{solver}" has one')


SOLVERS: Mapping[str, Callable[[Space, float, Made], Found]] = {
    "sha-ea": sha_ea.plan,
    "ilp": ilp_solver.plan,
    **baselines.PLANS,
}


def solvers_for(objective: Objective) -> list[str]:
    """Return the solvers that plan for an objective: all for throughput, the searches for any."""
    return list(SOLVERS) if objective.kind == THROUGHPUT else ["sha-ea", *baselines.SEARCHES]
