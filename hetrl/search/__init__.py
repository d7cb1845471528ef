"""Find a plan for a job on a topology: `solve` with one of the registered solvers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from hetrl.errors import UsageError
from hetrl.plan import Plan
from hetrl.search.assemble import Made, checked, finish, moved
from hetrl.search.baselines import verl
from hetrl.search.evaluate import INFEASIBLE, Evaluator, Value
from hetrl.search.infeasible import explain_infeasible, refuse_impossible
from hetrl.search.sha_ea import search
from hetrl.search.space import Chunk, Problem, Space, stars
from hetrl.suggest import nearest

__all__ = ["SOLVERS", "Problem", "solve"]

Found = tuple[Plan, int]  # the plan and how many complete plans were compared


def solve(
    problem: Problem, solver: str, budget_seconds: float, seed: int, inputs: Mapping[str, str] | None = None
) -> Plan:
    """Return a plan with its prediction that has passed `check`.

    `budget_seconds` bounds the search (the best so far is returned), `seed` fixes it; `inputs` are the digests that
    the plan records. Raises UsageError for an unknown solver, InfeasibleError where no plan can exist or none
    was found: it names the tightest constraint and the smallest remedy.
    """
    if solver not in SOLVERS:
        raise UsageError(f'unknown solver "{solver}"{nearest(solver, SOLVERS)}; known: {", ".join(sorted(SOLVERS))}')
    began = time.monotonic()
    space = Space(problem)
    refuse_impossible(space)
    plan, evaluations = SOLVERS[solver](space, budget_seconds, Made(solver, seed, inputs or {}))
    took = round(time.monotonic() - began, 3)
    return checked(replace(plan, solver=replace(plan.solver, seconds=took, evaluations=evaluations)), problem)


def _sha_ea(space: Space, budget_seconds: float, made: Made) -> Found:
    """Search each set of sites that one site can lead (one set, where all sites are linked); keep the best."""
    deadline, evaluations, best = time.monotonic() + budget_seconds, 0, Value(INFEASIBLE, ())
    sets = stars(space.problem.topology)
    for index, sites in enumerate(sets):
        part = Evaluator(Space(space.problem, sites))
        share = (deadline - time.monotonic()) / (len(sets) - index)
        best = min(best, search(part.space, part, share, made.seed), key=lambda value: value.seconds)
        evaluations += part.evaluations
    if best.seconds == INFEASIBLE:
        raise explain_infeasible(space, budget_seconds)
    packed = space.pack([_allotment(space, group.chunks) for group in best.groups])
    assert packed is not None  # the evaluator values only what can be packed
    groups = [
        {name: moved(task, group.chunks, chunks) for name, task in group.tasks.items()}
        for group, chunks in zip(best.groups, packed, strict=True)
    ]
    return finish(space.problem, groups, made), evaluations


def _allotment(space: Space, chunks: tuple[Chunk, ...]) -> tuple[int, ...]:
    counts = [0] * len(space.sizes)
    for chunk in chunks:
        counts[chunk.kind] += len(chunk.devices)
    return tuple(counts)


def _verl(space: Space, budget_seconds: float, made: Made) -> Found:
    del budget_seconds  # one pass over its few choices
    tasks, compared = verl.colocated(space)
    return finish(space.problem, [tasks], made), compared


SOLVERS: Mapping[str, Callable[[Space, float, Made], Found]] = {"sha-ea": _sha_ea, "verl": _verl}
