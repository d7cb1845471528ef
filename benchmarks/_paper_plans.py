"""Making and playing the plans of the bench `paper`, and what its result keeps of each."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from _paper_cases import DEFINED, Asked, Case, Knobs, Setting, problem

from hetrl.errors import InfeasibleError
from hetrl.plan.plan import Plan
from hetrl.search import Problem, finished, solve
from hetrl.search.assemble import Made as MadeBy
from hetrl.search.baselines import streamrl, verl
from hetrl.search.baselines.definition import AS_SOLVED, Definition
from hetrl.search.space import Space
from hetrl.simulator import simulate

UNBOUNDED_SECONDS = 1e9
PLANS = {"verl": verl.plan, "streamrl": streamrl.plan}


@dataclass(frozen=True)
class Made:
    """A plan as it is predicted and as the simulator plays it; without seconds where there is none.

    `seeds` are the predicted seconds of the search with each seed, of which the least are those of the plan; `tasks`
    the predicted seconds of each; `groups` the tasks of each group with its GPUs by type.
    """

    asked: Asked
    predicted_seconds: float | None
    played_seconds: float | None = None
    planning_seconds: float = 0.0
    compared: int = 0
    seeds: tuple[float, ...] = ()
    tasks: Mapping[str, float] | None = None
    groups: tuple[tuple[tuple[str, ...], Mapping[str, int]], ...] = ()

    @property
    def slowness(self) -> float:
        """Return the played seconds over the predicted ones."""
        return (self.played_seconds or 0.0) / (self.predicted_seconds or 1.0)


def make(asked: Asked, knobs: Knobs) -> Made:
    """Plan a case with one solver, the planner with each seed, and play the best plan."""
    planned, began = problem(asked.case, knobs), time.monotonic()
    try:
        plans = _plans(planned, asked, knobs)
    except InfeasibleError as error:
        print(f"{label(asked)}: {error}", file=sys.stderr)
        return Made(asked, None)
    took = time.monotonic() - began
    plan = min(plans, key=lambda one: one.predicted.iteration_seconds)
    gpus = {device.id: device.gpu for device in planned.topology.devices}
    return Made(
        asked,
        plan.predicted.iteration_seconds,
        simulate(plan, planned.model, 0).iteration_seconds,
        took,
        sum(one.solver.evaluations for one in plans),
        tuple(one.predicted.iteration_seconds for one in plans) if len(plans) > 1 else (),
        dict(plan.predicted.tasks),
        tuple((group.tasks, dict(Counter(gpus[device] for device in group.devices))) for group in plan.groups),
    )


def _plans(planned: Problem, asked: Asked, knobs: Knobs) -> list[Plan]:
    if asked.solver == knobs.planner:
        seeds = knobs.seeds
        return [solve(planned, asked.solver, UNBOUNDED_SECONDS, s, evaluations=knobs.evaluations) for s in seeds]
    if asked.definition == AS_SOLVED:
        return [solve(planned, asked.solver, UNBOUNDED_SECONDS, 0)]
    return [defined(planned, asked.solver, asked.definition)]


def defined(planned: Problem, solver: str, definition: Definition) -> Plan:
    """Return the plan of verl or streamrl under a definition."""
    made = MadeBy(solver, 0, {})
    plan, compared = PLANS[solver](Space(planned), UNBOUNDED_SECONDS, made, definition)
    return finished(replace(plan, solver=replace(plan.solver, evaluations=compared)), planned)


def label(asked: Asked) -> str:
    """Return the case and who plans, in words."""
    case, unusual = asked.case, asdict(asked.definition).items() - asdict(AS_SOLVED).items()
    words = [case.scenario, case.model, case.algorithm, case.mode, case.gpu, asked.solver]
    return " ".join([*filter(None, words), *(f"{key}={value}" for key, value in sorted(unusual))])


def shown(made: Made) -> str:
    """Return the line that tells how far the benchmark is."""
    if made.predicted_seconds is None:
        return f"{label(made.asked)}: none"
    return f"{label(made.asked)}: {made.predicted_seconds:.1f} s, played {made.played_seconds:.1f} s"


def record(made: Made) -> dict[str, Any]:
    """Return what the result keeps of a plan; `recorded` reads it."""
    case, definition = made.asked.case, asdict(made.asked.definition)
    whole = {key: value for key, value in asdict(made).items() if key != "asked"}
    named = {key: getattr(case, key) for key in ("scenario", "model", "algorithm", "mode", "gpu")}
    how = definition if made.asked.solver in DEFINED else {}
    return {**named, **case.setting.model_dump(), "solver": made.asked.solver, "definition": how, **whole}


def recorded(kept: Mapping[str, Any]) -> Made:
    """Return the plan that the result has kept."""
    setting = Setting(optimizer_steps=kept["optimizer_steps"], gradient_dtype=kept["gradient_dtype"])
    named = {key: kept[key] for key in ("scenario", "model", "algorithm", "mode", "gpu")}
    case = Case(setting=setting, **named)
    asked = Asked(case, kept["solver"], Definition(**kept["definition"]))
    groups = tuple((tuple(tasks), gpus) for tasks, gpus in kept["groups"])
    values = {
        key: kept[key] for key in ("predicted_seconds", "played_seconds", "planning_seconds", "compared", "tasks")
    }
    return Made(asked, seeds=tuple(kept["seeds"]), groups=groups, **values)
