"""The integer program as a solver: the best plan of the space S of `ilp_space`, or the best found and a bound.

    for each largest set of sites that are all linked:
        best = sha-ea in S, for a share of the time
        options, and columns that may be part of a better plan      (`ilp_options`, `ilp_columns`)
        integer program, until the time is spent                    (`ilp_model`)
        its plan, valued by the full model, is the answer if it is better

A set-partitioning formulation over group columns: HetRL (arXiv 2512.12476) section 4 states the problem as a mixed
integer program; docs/ilp.md has the space and what its constants leave out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from hetrl.errors import InfeasibleError
from hetrl.plan.plan import Plan
from hetrl.search.assemble import Made
from hetrl.search.core.encoding import Vector, views
from hetrl.search.core.functions import repair
from hetrl.search.evaluate import Evaluator
from hetrl.search.ilp.columns import Columns, make_columns
from hetrl.search.ilp.model import Solution, composed_seconds, solve_program
from hetrl.search.ilp.options import Menu, UnfinishedError, read_menu
from hetrl.search.infeasible import explain_infeasible
from hetrl.search.limits import Limits
from hetrl.search.sha_ea import search
from hetrl.search.space import Space, linked_sets

START_SHARE = 0.2  # of the time, for sha-ea
EXACT = 1e-4  # relative difference up to which a value is the bound


@dataclass(frozen=True)
class Outcome:
    """What the integer program found in S.

    `seconds` is the value of `x` by the full model, `composed` by the program's constants (infinite where it found no
    plan within the limit); no plan of S takes less than `bound` by these constants. `proven`: the program ran to its
    end, so `bound` is the least value, or the limit where no plan is below that. `interrupted`: Ctrl-C ended it.
    """

    x: Vector
    seconds: float
    composed: float
    bound: float
    proven: bool
    columns: int
    interrupted: bool = False


def plan(space: Space, budget_seconds: float, made: Made) -> tuple[Plan, int]:
    """Return the best plan found, with status and bound, and how many plans sha-ea valued before.

    Raises InfeasibleError where no plan was found. An interrupt (Ctrl-C) ends the search; it is passed on where there
    is no plan yet.
    """
    deadline, compared, bound = time.monotonic() + budget_seconds, 0, np.inf
    best: tuple[float, Vector, Evaluator] | None = None
    interrupted = False
    sets = [*linked_sets(space.problem.topology)]
    for index, sites in enumerate(sets):
        try:
            evaluator = Evaluator(replace(space, sites=sites), narrow=True)
        except InfeasibleError:
            continue  # a task has no device among these sites
        now = time.monotonic()
        end = now + (deadline - now) / (len(sets) - index)
        start = search(evaluator, Limits(now + START_SHARE * (end - now)), made.seed)
        compared += evaluator.evaluations
        found = _unproven(start.x, start.seconds, start.interrupted)
        if np.isfinite(start.seconds) and not start.interrupted:  # without a limit the columns are too many
            found = best_in_space(evaluator, start.x, start.seconds, end)
        bound = min(bound, found.bound)
        if np.isfinite(found.seconds) and (best is None or found.seconds < best[0]):
            best = found.seconds, found.x, evaluator
        if interrupted := found.interrupted:
            break
    if best is None and interrupted:
        raise KeyboardInterrupt
    if best is None:
        raise explain_infeasible(space, f"within {budget_seconds:g} s", "planner.budget_seconds", compared)
    seconds, x, evaluator = best
    answer = evaluator.assemble(x, made)
    status = "optimal" if seconds <= bound * (1 + EXACT) else "feasible"
    solver = replace(answer.solver, status=status, bound_seconds=float(bound) if bound > 0 else None)
    return replace(answer, solver=solver), compared


def best_in_space(evaluator: Evaluator, start: Vector, limit: float, deadline: float) -> Outcome:
    """Return the best plan of S that is found by the deadline (of the monotonic clock); at least `start`.

    `limit`: the seconds of `start` by the full model. An interrupt (Ctrl-C) ends the search.
    """
    tables = evaluator.tables
    try:
        menu = read_menu(evaluator, limit, deadline)
        columns = make_columns(menu, tables, limit, deadline)
        solution = solve_program(columns, menu, tables, limit, deadline)
    except UnfinishedError:
        return _unproven(start, limit)
    except KeyboardInterrupt:
        return _unproven(start, limit, interrupted=True)
    if not solution.columns:
        return Outcome(start, limit, np.inf, solution.bound, solution.proven, len(columns.tasks))
    x = vector_of(columns, menu, solution, evaluator)
    seconds, _ = evaluator.parts(x)
    chosen = [*solution.columns]
    composed = composed_seconds(columns.numbers[chosen], columns.tasks[chosen], tables)
    if seconds > limit:
        x, seconds = start, limit
    return Outcome(x, seconds, composed, solution.bound, solution.proven, len(columns.tasks))


def _unproven(x: Vector, seconds: float, interrupted: bool = False) -> Outcome:
    """Return a plan of sha-ea of which the program says nothing, not even a bound."""
    return Outcome(x, seconds, np.inf, 0.0, False, 0, interrupted)


def vector_of(columns: Columns, menu: Menu, solution: Solution, evaluator: Evaluator) -> Vector:
    """Return the plan of the chosen columns."""
    tables = evaluator.tables
    x = np.zeros(evaluator.size, np.int32)
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    for index, column in enumerate(solution.columns):
        devices[index] = menu.allotments[columns.allotment[column]]
        for task in np.flatnonzero(columns.picks[column] >= 0):
            genes = menu.options[task].genes[columns.picks[column, task]]
            group[task], classes[task], choice[task] = index, genes[: tables.classes], genes[tables.classes :]
    repair(x, evaluator.bench.pointers[0])
    return x
