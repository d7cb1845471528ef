"""What the bench `paper` runs: its knobs, the cases, and the planning problem of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from _results import ROOT

from hetrl.describe.sites import read_scenario, topology_of
from hetrl.describe.yaml_file import Strict
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan
from hetrl.search import Problem
from hetrl.workload import Lengths, Workload, architecture

SYNC, ASYNC = "sync", "async"


class Batch(Strict):
    """One iteration, as in an experiment file."""

    samples: int
    samples_per_prompt: int
    prompt_tokens: int
    response_tokens: int


class Setting(Strict):
    """What the paper leaves open about training."""

    optimizer_steps: int
    gradient_dtype: str


class Sample(Strict):
    """The part that runs by default."""

    models: tuple[str, ...]
    algorithms: tuple[str, ...]


class Expert(Strict):
    """Ratios to reach against verl-expert."""

    mean: float
    least: float


class Knobs(Strict):
    """`paper.yaml`."""

    scenarios: tuple[str, ...]
    models: tuple[str, ...]
    algorithms: tuple[str, ...]
    sample: Sample
    batch: Batch
    optimizer_steps: int
    gradient_dtype: str
    max_staleness: int
    sensitivity: tuple[Setting, ...]
    planner: str
    rivals: dict[str, tuple[str, ...]]
    budget_seconds: dict[str, float]
    seed: int
    widened_by: float
    cells_to_reach: int
    expert: Expert
    simulator_indifferent: float

    @property
    def setting(self) -> Setting:
        """Return the setting of the cells; those of `sensitivity` differ."""
        return Setting(optimizer_steps=self.optimizer_steps, gradient_dtype=self.gradient_dtype)


@dataclass(frozen=True)
class Case:
    """One plan to make."""

    scenario: str
    model: str
    algorithm: str
    mode: str
    setting: Setting


@dataclass(frozen=True)
class Made:
    """The plan of one solver for a case; None where it finds none."""

    case: Case
    solver: str
    plan: Plan | None
    simulated_seconds: float | None

    @property
    def seconds(self) -> float | None:
        """Return the predicted seconds of an iteration."""
        return self.plan.predicted.iteration_seconds if self.plan else None


@dataclass(frozen=True)
class Outcome:
    """All plans of a run; `paper` has the paper's range of each ratio and scenario."""

    knobs: Knobs
    paper: Mapping[str, Mapping[str, tuple[float, float]]]
    made: Mapping[tuple[Case, str], Made]
    full: bool


@cache
def topology(scenario: str) -> Topology:
    """Return the sites of a scenario."""
    return topology_of(read_scenario(ROOT / "topology" / "scenarios" / f"{scenario}.yaml"))


def problem(case: Case, knobs: Knobs) -> Problem:
    """Return the planning problem of a case: critic (PPO), reference and reward model of the actor's size."""
    model, batch = architecture(case.model), knobs.batch
    workload = Workload(
        algorithm=case.algorithm,
        mode=case.mode,
        max_staleness=knobs.max_staleness if case.mode == ASYNC else 0,
        samples=batch.samples,
        samples_per_prompt=batch.samples_per_prompt,
        prompt_tokens=batch.prompt_tokens,
        response=Lengths(batch.response_tokens, batch.response_tokens),
        optimizer_steps_per_iteration=case.setting.optimizer_steps,
        actor=model,
        critic=model if case.algorithm == "ppo" else None,
        reference=model,
        reward=model,
        gradient_dtype=case.setting.gradient_dtype,
    )
    return Problem(topology(case.scenario), workload)


def cases(knobs: Knobs, full: bool) -> Iterator[Case]:
    """Yield the cases of the paper's cells, then in a full run those of the sensitivity."""
    part = knobs if full else knobs.sample
    for scenario, model, algorithm, mode in product(knobs.scenarios, part.models, part.algorithms, (SYNC, ASYNC)):
        yield Case(scenario, model, algorithm, mode, knobs.setting)
    for setting in knobs.sensitivity if full else ():
        for choice in product(knobs.scenarios, knobs.sample.models, knobs.sample.algorithms, (SYNC, ASYNC)):
            yield Case(*choice, setting)
