"""Why a plan is as it is: where its time goes, what binds each task, what other choices and hardware would change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hetrl.cost.iteration import with_prediction
from hetrl.explanation.curve import Curve, curve
from hetrl.explanation.idle import Idle, idle
from hetrl.explanation.memory import Memory, memory
from hetrl.explanation.resources import Part, attribution, critical_path
from hetrl.explanation.training_sites import TrainingSites, training_sites
from hetrl.explanation.what_if import Study, study
from hetrl.explanation.worse_links import WorseLink, worse_links
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.workload import ITERATION

__all__ = ["Curve", "Explanation", "Study", "curve", "explain", "study", "with_choices"]


@dataclass(frozen=True)
class Explanation:
    """What the cost model says about a plan; `plan` has its prediction as of the rates in force.

    `path` has the seconds that each task adds to the iteration, `binds` those of each resource in each task, in
    `weight_sync` and in the `iteration`; each of them sums to the whole.
    """

    plan: Plan
    path: tuple[Part, ...]
    binds: Mapping[str, tuple[Part, ...]]
    memory: tuple[Memory, ...]
    idle: tuple[Idle, ...] = ()
    training: TrainingSites | None = None
    worse_links: tuple[WorseLink, ...] = ()
    study: Study | None = None
    curve: Curve | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON's types; of the plan, what it predicts."""
        document = {key: value for key, value in asdict(self).items() if key != "plan"}
        return {"predicted": self.plan.to_json()["predicted"], **document}


def explain(plan: Plan, problem: Problem) -> Explanation:
    """Return where the time and the memory of a plan go; the plan must pass `check`."""
    model = problem.model
    plan = with_prediction(plan, model)
    return Explanation(plan, critical_path(plan, model), attribution(plan, model), memory(plan, model))


def with_choices(explanation: Explanation, problem: Problem) -> Explanation:
    """Return the explanation with why GPUs are idle, why training is where it is, and what worse links would cost.

    Takes seconds of work.
    """
    plan = explanation.plan
    waits = explanation.binds.get(ITERATION, ())
    return replace(
        explanation,
        idle=idle(plan, problem, waits),
        training=training_sites(plan, problem.model),
        worse_links=worse_links(plan, problem),
    )
