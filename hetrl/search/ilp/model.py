"""The integer program over columns, with PuLP: HiGHS, or CBC where HiGHS is not installed.

    x_c in {0, 1}                       column c is a group of the plan
    sum of x_c over columns of t = 1    for every task t
    sum of a_ck x_c <= n_k              for every device class k
    I >= sum of i_c x_c over columns of t, for every inference t and the actor's training
    R  = sum of r_c x_c over columns of the actor's training
    Y >= y_c x_c                        a version's way inside a group that trains the actor and generates
    Y >= sum w_ck x_c - W_k (1 - sum r_ck x_c)     to rollouts of another group on class k: w_ck from columns that
                                        train the actor, r_ck = 1 for those that generate on k, W_k the largest w_ck
    Y >= the least w_ck x_c over classes k         wherever the rollouts are
    Z >= sum of (g + i + r + q)_c x_c over columns of t, for every t;   Z >= Y
    (1 + max_staleness) Z >= sum of (r + q)_c x_c over columns of the critic's training + sum of v_c x_c
    sync:  Z >= sum of g_c x_c + I + R + Y
           Z >= sum of (g + r + q)_c x_c over columns of generation + I
    async: (1 + max_staleness) Z >= sum of l_c x_c + I + R + Y
    Z <= the limit; minimise Z

g, i, r, q are a column's generation, inferences, training of the actor and of the critic, v its critic's inference; l
the least time from a batch's admission to its last sample.

    relaxation: solve it with some columns; add those of negative reduced cost; until there is none
    its value bounds every plan; a column whose reduced cost exceeds limit - value is in no plan within the limit
    solve the integer program with the columns that are left
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pulp

from hetrl.search.core.ilp_states import (
    CHAIN,
    CRITIC,
    GENERATION,
    INFERENCES,
    SECONDS,
    TRAINING,
    TRANSFER,
    VALUES,
)
from hetrl.search.core.tables import Tables
from hetrl.search.ilp.columns import Columns
from hetrl.search.ilp.options import Menu
from hetrl.search.ilp.space import Floats, Ints

PRICED = 5_000  # columns to start the relaxation with, and to add at most in one round
ROUNDING = 1e-6  # about what solvers let a constraint or a reduced cost be off by
GAP = 1e-6
AUXILIARY = ("Z", "I", "R", "Y")


@dataclass(frozen=True)
class Row:
    """One constraint: weights of the columns plus those of Z, I, R, Y; `sense` is pulp's."""

    weights: Floats
    auxiliary: tuple[float, float, float, float]
    sense: int
    right: float


@dataclass(frozen=True)
class Solution:
    """The chosen columns (none where no plan within the limit was found) and a bound below every plan's seconds.

    `proven`: the bound is the least value, or no plan is within the limit.
    """

    columns: tuple[int, ...]
    bound: float
    proven: bool


def composed_seconds(numbers: Floats, tasks: Ints, tables: Tables) -> float:
    """Return the objective of a plan of these columns, one row each."""
    classes, phases = tables.classes, numbers[:, :CHAIN]
    generator = (tasks >> tables.generation & 1).argmax()
    trainer = (tasks >> tables.trainer & 1).argmax()
    runs = numbers[generator, SECONDS + classes :] > 0
    apart = numbers[trainer, SECONDS : SECONDS + classes][runs]
    transfer = max(numbers[:, TRANSFER].max(), apart.max(initial=0.0))
    most, batches = phases.max(axis=0), 1 + tables.staleness
    way = most[INFERENCES] + most[TRAINING] + transfer
    seconds = [phases.sum(axis=1).max(), transfer]
    if len(tables.trained) > 1:
        critic = (tasks >> tables.trained[1] & 1).argmax()
        seconds.append((phases[critic, TRAINING:].sum() + numbers[:, VALUES].max()) / batches)
    if tables.staleness == 0:
        own = phases[generator, [GENERATION, TRAINING, CRITIC]].sum()
        seconds += [most[GENERATION] + way, own + most[INFERENCES]]
    else:
        seconds.append((numbers[generator, CHAIN] + way) / batches)
    return float(max(seconds))


def rows_of(columns: Columns, menu: Menu, tables: Tables, limit: float) -> list[Row]:
    """Return the constraints."""
    numbers, least, most = columns.numbers, pulp.LpConstraintGE, pulp.LpConstraintLE
    nothing = np.zeros(len(columns.tasks))
    rows = []
    for task in range(tables.tasks):
        owns = (columns.tasks >> task & 1).astype(float)
        rows.append(Row(owns, (0, 0, 0, 0), pulp.LpConstraintEQ, 1))
        if tables.is_inference[task]:
            rows.append(Row(-owns * numbers[:, INFERENCES], (0, 1, 0, 0), least, 0))
        if task == tables.trainer:  # which scores the batch
            rows.append(Row(-owns * numbers[:, INFERENCES], (0, 1, 0, 0), least, 0))
            rows.append(Row(-owns * numbers[:, TRAINING], (0, 0, 1, 0), least, 0))
        rows.append(Row(-owns * numbers[:, :CHAIN].sum(axis=1), (1, 0, 0, 0), least, 0))
    for kind in range(tables.classes):
        owned = menu.allotments[columns.allotment, kind].astype(float)
        rows.append(Row(owned, (0, 0, 0, 0), most, float(tables.devices[kind])))
    rows += [Row(-numbers[:, TRANSFER], (0, 0, 0, 1), least, 0), *_between_groups(columns, tables)]
    rows.append(Row(nothing, (1, 0, 0, -1), least, 0))
    batches = 1 + tables.staleness
    if len(tables.trained) > 1:
        trains = (columns.tasks >> tables.trained[1] & 1).astype(float)
        weights = -trains * numbers[:, [TRAINING, CRITIC]].sum(axis=1) - numbers[:, VALUES]
        rows.append(Row(weights, (batches, 0, 0, 0), least, 0))
    if tables.staleness:
        rows.append(Row(-numbers[:, CHAIN], (batches, -1, -1, -1), least, 0))
    else:
        own = (columns.tasks >> tables.generation & 1) * numbers[:, [GENERATION, TRAINING, CRITIC]].sum(axis=1)
        rows.append(Row(-numbers[:, GENERATION], (1, -1, -1, -1), least, 0))
        rows.append(Row(-own, (1, -1, 0, 0), least, 0))
    return rows


def _between_groups(columns: Columns, tables: Tables) -> list[Row]:
    """Return the bounds of Y by the way of a version to rollouts of another group."""
    apart, runs = np.split(columns.numbers[:, SECONDS:], [tables.classes], axis=1)
    serves = tables.serving.options[tables.generation] > 0
    rows = [Row(-apart[:, serves].min(axis=1, initial=np.inf), (0, 0, 0, 1), pulp.LpConstraintGE, 0)]
    for kind in np.flatnonzero(serves):
        if (largest := float(apart[:, kind].max(initial=0.0))) > 0:
            weights = -apart[:, kind] - largest * runs[:, kind]
            rows.append(Row(weights, (0, 0, 0, 1), pulp.LpConstraintGE, -largest))
    return rows


def solve_program(columns: Columns, menu: Menu, tables: Tables, limit: float, deadline: float) -> Solution:
    """Return the best plan of at most `limit` seconds that is found by the deadline (of the monotonic clock)."""
    if len(columns.tasks) == 0:
        return Solution((), limit, True)
    rows = rows_of(columns, menu, tables, limit)
    matrix = np.array([row.weights for row in rows])
    relaxed = _relaxation(rows, matrix, limit, deadline)
    if relaxed is None:
        return Solution((), 0.0, False)
    bound, reduced = relaxed
    if bound > limit * (1 + ROUNDING):
        return Solution((), limit, True)
    places = np.flatnonzero(reduced <= limit - bound + ROUNDING * limit)
    model, x = _program(rows, matrix[:, places], "Binary")
    model += x[-len(AUXILIARY)] <= limit * (1 + ROUNDING)
    solver = _run(model, deadline)
    if model.status == pulp.LpStatusInfeasible:
        return Solution((), limit, True)
    bound = max(bound, _dual_bound(model, solver))
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Solution((), bound, False)
    chosen = tuple(int(place) for place, one in zip(places, x, strict=False) if one.value() > 0.5)
    return Solution(chosen, bound, model.sol_status == pulp.LpSolutionOptimal)


def _relaxation(rows: list[Row], matrix: Floats, limit: float, deadline: float) -> tuple[float, Floats] | None:
    """Return the relaxation's value and every column's reduced cost; None where time ran out.

    It starts with some columns and prices the others from the duals. A task may stay out at a price that no plan pays,
    so that few columns have a solution, too.
    """
    inside = np.zeros(matrix.shape[1], bool)
    inside[:: max(matrix.shape[1] // PRICED, 1)] = True
    while time.monotonic() < deadline:
        model, _ = _program(rows, matrix[:, inside], "Continuous", 10 * limit)
        _run(model, deadline)
        if model.sol_status != pulp.LpSolutionOptimal:
            return None
        duals = np.array([model.get_constraint_by_name(f"row{index}").pi for index in range(len(rows))])
        reduced = np.where(inside, 0.0, -(duals @ matrix))
        wanted = np.flatnonzero(reduced < -ROUNDING)
        if len(wanted) == 0:
            return float(pulp.value(model.objective)), np.maximum(-(duals @ matrix), 0.0)
        inside[wanted[np.argsort(reduced[wanted])[:PRICED]]] = True
    return None


def _program(
    rows: list[Row], matrix: Floats, kind: str, price: float | None = None
) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    """Return the program over these columns and its variables: the columns', then Z, I, R, Y, V.

    With a price a task may stay out of all columns for so many seconds.
    """
    model = pulp.LpProblem("groups", pulp.LpMinimize)
    x = [model.add_variable(f"x{n}", 0, 1, kind) for n in range(matrix.shape[1])]
    auxiliary = [model.add_variable(name, 0) for name in AUXILIARY]
    out = []
    model += auxiliary[0]
    for index, (row, weights) in enumerate(zip(rows, matrix, strict=True)):
        terms = [(x[n], float(weights[n])) for n in np.flatnonzero(weights)]
        terms += [(one, float(weight)) for one, weight in zip(auxiliary, row.auxiliary, strict=True) if weight]
        if row.sense == pulp.LpConstraintEQ and price is not None:
            out.append(model.add_variable(f"out_row{index}", 0))
            terms.append((out[-1], 1.0))
        model += pulp.LpConstraint(pulp.LpAffineExpression(terms), row.sense, f"row{index}", row.right)
    if price is not None:
        model.setObjective(auxiliary[0] + price * pulp.lpSum(out))
    return model, [*x, *auxiliary]


def _run(model: pulp.LpProblem, deadline: float) -> pulp.LpSolver:
    """Solve on one thread (login nodes are shared) until the deadline; return the solver that did."""
    asked = {"msg": False, "threads": 1, "timeLimit": max(deadline - time.monotonic(), 0.1), "gapRel": GAP}
    solver = pulp.HiGHS(**asked)
    if not solver.available():
        solver = pulp.PULP_CBC_CMD(**asked)
    model.solve(solver)
    if model.status == pulp.LpStatusNotSolved and isinstance(solver, pulp.HiGHS):
        # HiGHS 1.15.1 presolves some programs without a solution to one, and sees itself that it is none
        solver = pulp.HiGHS(**asked, presolve="off")
        model.solve(solver)
    return solver


def _dual_bound(model: pulp.LpProblem, solver: pulp.LpSolver) -> float:
    """Return the solver's proven bound; CBC tells none through PuLP, but the optimum."""
    if isinstance(solver, pulp.HiGHS):
        return float(model.solverModel.getInfo().mip_dual_bound)
    return float(pulp.value(model.objective)) if model.sol_status == pulp.LpSolutionOptimal else 0.0
