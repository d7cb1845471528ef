"""One search of one problem with its best plan over time, and the best plans that any search has ever found."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import numpy as np
from _results import ROOT

from hetrl.search import Problem, sha_ea
from hetrl.search.assemble import Made
from hetrl.search.baselines import deap_ea, random_plans, verl
from hetrl.search.core import precompile
from hetrl.search.core.encoding import Vector
from hetrl.search.evaluate import Evaluator
from hetrl.search.ilp.solver import START_SHARE, best_in_space
from hetrl.search.limits import Limits, Progress
from hetrl.search.space import Space

BEST_KNOWN = ROOT / "benchmarks" / "data" / "best_known.json"
SEARCHES = {"sha-ea": sha_ea.search, "deap": deap_ea.search, "random": random_plans.search}
SAME = 1e-6  # relative difference up to which two values are one


@dataclass(frozen=True)
class Point:
    """The best plan at one moment of a search."""

    wall_seconds: float
    iteration_seconds: float
    evaluations: int


@dataclass(frozen=True)
class Run:
    """A search: its best plan over time, the first point being the first feasible one, and the last plan's vector."""

    solver: str
    seed: int
    points: tuple[Point, ...]
    wall_seconds: float
    evaluations: int
    vector: tuple[int, ...] = ()
    bound_seconds: float = 0.0

    @property
    def best(self) -> float:
        """Return the iteration's seconds at the end; infinite where nothing was found."""
        return self.value_at(inf)

    def value_at(self, wall_seconds: float) -> float:
        """Return the iteration's seconds after so much of the search."""
        return min((one.iteration_seconds for one in self.points if one.wall_seconds <= wall_seconds), default=inf)

    def value_after(self, evaluations: int) -> float:
        """Return the iteration's seconds after so many evaluations."""
        return min((one.iteration_seconds for one in self.points if one.evaluations <= evaluations), default=inf)

    def reached(self, iteration_seconds: float) -> float:
        """Return when a plan this good was found; infinite where none was."""
        wanted = iteration_seconds * (1 + SAME)
        return min((one.wall_seconds for one in self.points if one.iteration_seconds <= wanted), default=inf)


@dataclass(frozen=True)
class Known:
    """The best plan known of a case, and what found it. `vector` is the plan itself: it can be valued again."""

    iteration_seconds: float
    solver: str
    seed: int
    wall_seconds: float
    command: str
    vector: tuple[int, ...]


def warm_up(problem: Problem) -> None:
    """Compile all that the solvers need, or load it: it is no search."""
    precompile.main()
    for search in SEARCHES.values():
        search(Evaluator(Space(problem)), Limits(inf, 100), 0, None)


def use_one_core() -> None:
    """Keep this process on one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def run_search(solver: str, problem: Problem, wall_seconds: float, seed: int) -> Run:
    """Search for so long, from an evaluator that has met no plan yet. Its tables are made before the clock starts."""
    evaluator, points = Evaluator(Space(problem)), list[Point]()
    began = time.monotonic()

    def note(progress: Progress) -> None:
        if progress.seconds < (points[-1].iteration_seconds if points else inf):
            points.append(Point(time.monotonic() - began, progress.seconds, progress.evaluations))

    best = SEARCHES[solver](evaluator, Limits(began + wall_seconds), seed, note)
    if best.interrupted:
        raise KeyboardInterrupt
    note(Progress(best.seconds, evaluator.evaluations, 1))
    took = time.monotonic() - began
    return Run(solver, seed, tuple(points), took, evaluator.evaluations, tuple(best.x.tolist()))


def run_ilp(problem: Problem, wall_seconds: float, seed: int) -> Run:
    """Let the integer program look for a plan; its only point is its answer."""
    evaluator, began = Evaluator(Space(problem), narrow=True), time.monotonic()
    start = sha_ea.search(evaluator, Limits(began + START_SHARE * wall_seconds), seed)
    found = best_in_space(evaluator, start.x, start.seconds, began + wall_seconds)
    took, vector = time.monotonic() - began, tuple(found.x.tolist())
    points = (Point(took, found.seconds, evaluator.evaluations),) if found.seconds < inf else ()
    return Run("ilp", seed, points, took, evaluator.evaluations, vector, found.bound)


def run_verl(problem: Problem, wall_seconds: float, seed: int) -> Run:
    """Plan as verl's users do; the only point is the answer."""
    began = time.monotonic()
    plan, compared = verl.plan(Space(problem), wall_seconds, Made("verl", seed, {}))
    took = time.monotonic() - began
    return Run("verl", seed, (Point(took, plan.predicted.iteration_seconds, compared),), took, compared)


def record(run: Run) -> dict[str, object]:
    """Return what a result keeps of a run."""
    points = [[round(one.wall_seconds, 3), one.iteration_seconds, one.evaluations] for one in run.points]
    return {
        "solver": run.solver,
        "seed": run.seed,
        "wall_seconds": run.wall_seconds,
        "evaluations": run.evaluations,
        "bound_seconds": run.bound_seconds or None,
        "best_over_time": points,
    }


def finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Return the figures with nothing in place of what is infinite: JSON has no infinity."""
    return {name: None if figure == inf else figure for name, figure in figures.items()}


def best_known(case: str, problem: Problem) -> Known | None:
    """Return the best plan known of a case, valued by the cost model as it is; None where there is none."""
    entry = _all_known().get(case)
    if entry is None:
        return None
    evaluator = Evaluator(Space(problem))
    if len(entry["vector"]) != evaluator.size:
        return None  # of another encoding
    vector: Vector = np.array(entry["vector"], np.int32)
    seconds, _ = evaluator.parts(vector)
    return Known(**{**entry, "iteration_seconds": seconds, "vector": tuple(entry["vector"])})


def best_of(known: Known | None, runs: Sequence[Run], command: str) -> Known | None:
    """Return the best plan known, or that of a run which beats it."""
    best = min((one for one in runs if one.vector), key=lambda one: one.best, default=None)
    if best is None or (known is not None and best.best >= known.iteration_seconds * (1 - SAME)):
        return known
    return Known(best.best, best.solver, best.seed, round(best.reached(best.best), 1), command, best.vector)


def keep(case: str, known: Known) -> None:
    """Write down the best plan known of a case."""
    document = {**_all_known(), case: asdict(known)}
    lines = [f" {json.dumps(name)}: {json.dumps(document[name])}" for name in sorted(document)]  # a case a line
    BEST_KNOWN.parent.mkdir(exist_ok=True)
    BEST_KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _all_known() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(BEST_KNOWN.read_text()) if BEST_KNOWN.exists() else {}
    return found
