"""What the bench `paper` runs: its knobs, the cases, the planning problem of each, and who plans for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from _results import ROOT

from hetrl.describe.sites import read_scenario, topology_of
from hetrl.describe.yaml_file import Strict
from hetrl.hardware import Topology
from hetrl.lengths import Lengths
from hetrl.search import Problem
from hetrl.search.baselines.definition import AS_SOLVED, Definition
from hetrl.workload import Workload, architecture

SYNC, ASYNC = "sync", "async"
DEFINED = ("verl", "streamrl")  # what a `Definition` is about


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


class Alone(Strict):
    """All GPUs against those of one type."""

    scenario: str
    model: str
    gpu: str
    rivals: dict[str, tuple[str, ...]]


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
    evaluations: int
    seeds: tuple[int, ...]
    rivals: dict[str, tuple[str, ...]]
    definitions: dict[str, Definition]
    widened_by: float
    cells_to_reach: int
    expert: Expert
    alone: Alone
    simulator_indifferent: float

    @property
    def setting(self) -> Setting:
        """Return the setting of the cells; those of `sensitivity` differ."""
        return Setting(optimizer_steps=self.optimizer_steps, gradient_dtype=self.gradient_dtype)


@dataclass(frozen=True)
class Case:
    """A job on a scenario; `gpu` names the only type of GPUs that it may use, empty: all."""

    scenario: str
    model: str
    algorithm: str
    mode: str
    setting: Setting
    gpu: str = ""


@dataclass(frozen=True)
class Asked:
    """One plan to make: the case, the solver, and how it is read where that is open."""

    case: Case
    solver: str
    definition: Definition = AS_SOLVED


@cache
def topology(scenario: str, gpu: str = "") -> Topology:
    """Return the sites of a scenario; with `gpu`, their nodes of this type alone."""
    whole = topology_of(read_scenario(ROOT / "topology" / "scenarios" / f"{scenario}.yaml"))
    if not gpu:
        return whole
    kept = [replace(site, nodes=tuple(node for node in site.nodes if node.gpu == gpu)) for site in whole.sites]
    sites = tuple(site for site in kept if site.nodes)
    names = {site.name for site in sites}
    return Topology(sites, tuple(link for link in whole.links if names.issuperset(link.between)))


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
    return Problem(topology(case.scenario, case.gpu), workload)


def rival(name: str, definition: Definition, case: Case) -> Asked:
    """Return who plans as `name` under a definition; what does not matter to the case is as the solvers have it."""
    if name not in DEFINED:
        return Asked(case, name)
    if name == "verl" and definition.chosen_hosts:
        return Asked(case, "verl-expert")
    if name == "verl":  # its GPUs are not divided
        definition = replace(definition, sees_links=True)
    if case.algorithm != "ppo":
        definition = replace(definition, critic_apart=False)
    return Asked(case, name, definition)


def cases(knobs: Knobs, full: bool) -> Iterator[Case]:
    """Yield the cases of the paper's cells, then in a full run those of the sensitivity."""
    part = knobs if full else knobs.sample
    for scenario, model, algorithm, mode in product(knobs.scenarios, part.models, part.algorithms, (SYNC, ASYNC)):
        yield Case(scenario, model, algorithm, mode, knobs.setting)
    for setting in knobs.sensitivity if full else ():
        for choice in product(knobs.scenarios, knobs.sample.models, knobs.sample.algorithms, (SYNC, ASYNC)):
            yield Case(*choice, setting)


def asked(knobs: Knobs, full: bool) -> list[Asked]:
    """Return every plan to make, once: of the cases by all definitions, then those on GPUs of one type."""
    found: list[Asked] = []
    for case in cases(knobs, full):
        definitions = knobs.definitions.values() if case.setting == knobs.setting else (AS_SOLVED,)
        found += [Asked(case, knobs.planner)]
        found += [rival(name, one, case) for name, one in product(knobs.rivals[case.mode], definitions)]
    alone, algorithms = knobs.alone, (knobs if full else knobs.sample).algorithms
    for algorithm, mode in product(algorithms, (SYNC, ASYNC)):
        case = Case(alone.scenario, alone.model, algorithm, mode, knobs.setting, alone.gpu)
        found += [Asked(case, name) for name in (knobs.planner, *alone.rivals[mode])]
    return list(dict.fromkeys(found))
