"""Reading an experiment file and the files that it names, and the problem that they make together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from pathlib import Path

from hetrl.cost.efficiency import Efficiencies, calibrated
from hetrl.cost.model import CostModel
from hetrl.cost.objective import FASTEST, Objective
from hetrl.describe.experiment import Experiment, Planner
from hetrl.describe.launching import link_name
from hetrl.describe.links import LinkEntry
from hetrl.describe.measured import Measured, merge
from hetrl.describe.measured_files import read_all
from hetrl.describe.measured_links import MeasuredLinks, delay_and_gbps
from hetrl.describe.models import critic_of
from hetrl.describe.response_lengths import read_lengths
from hetrl.describe.sites import ScenarioFile, read_scenario, read_sites, topology_of
from hetrl.describe.yaml_file import find, read_yaml
from hetrl.errors import UsageError, nearest
from hetrl.hardware import Topology
from hetrl.workload import Workload, architecture, architecture_catalogue

PLACES = {  # by section the keys that may name a file or directory, which are elsewhere names of the catalogue, too
    "model": ("architecture", "weights"),
    "reward": ("architecture", "weights"),
    "critic": ("architecture", "weights"),
    "data": ("path",),
}


@dataclass(frozen=True)
class Files:
    """What an experiment file says, and the files that it names: its sites, response lengths, measurements.

    The links of the scenario are the measured ones where there are such.
    """

    experiment: Experiment
    scenario: ScenarioFile
    lengths: tuple[int, ...] = ()
    measured: Mapping[Path, Measured] = field(default_factory=dict)
    measured_links: Mapping[Path, MeasuredLinks] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """Return the measured shares of all machines together, {GPU type: {phase: share}}."""
        return merge(self.measured.values())

    @cached_property
    def topology(self) -> Topology:
        """Return the sites and links as the planner takes them."""
        return topology_of(self.scenario)

    @cached_property
    def workload(self) -> Workload:
        """Return the job as the planner takes it."""
        return workload_of(self.experiment, self.lengths)

    @property
    def digests(self) -> dict[str, str]:
        """Return the sha256 of experiment and topology, the measured shares included, as a plan records them."""
        topology = self.scenario.model_dump(mode="json")
        return {
            "experiment": _digest(self.experiment.model_dump(mode="json")),
            "topology": _digest({**topology, "measured": self.shares} if self.shares else topology),
        }


def _digest(document: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Problem:
    """What to plan: a job, the sites that may run it, what the plan is chosen for, the efficiencies of the GPUs.

    `files` is what it was read from; None where it was made in code.
    """

    topology: Topology
    workload: Workload
    objective: Objective = FASTEST
    efficiencies: Efficiencies = field(default_factory=calibrated)
    files: Files | None = None

    def __post_init__(self) -> None:
        """Tell the efficiencies of the GPU types that the topology describes."""
        object.__setattr__(self, "efficiencies", self.efficiencies.with_types(self.topology.described))

    @cached_property
    def model(self) -> CostModel:
        """Return what predicts the plans."""
        return CostModel(self.topology, self.workload, self.efficiencies)

    @property
    def planner(self) -> Planner:
        """Return what the experiment says of the planner, or its defaults where the problem was made in code."""
        return self.files.experiment.planner if self.files else Planner()

    @property
    def experiment(self) -> Experiment:
        """Return the experiment file; UsageError where the problem was made in code."""
        return self._read.experiment

    @property
    def scenario(self) -> ScenarioFile:
        """Return the files of the sites; UsageError where the problem was made in code."""
        return self._read.scenario

    @property
    def _read(self) -> Files:
        if self.files is None:
            raise UsageError("the problem was made in code; `read_problem` reads one from an experiment file")
        return self.files

    @property
    def digests(self) -> dict[str, str]:
        """Return the sha256 of what it was read from, as a plan records them; of what was changed since, nothing."""
        if self.files is None:
            return {}
        kept = {
            "experiment": self.workload == self.files.workload,
            "topology": self.topology == self.files.topology,
        }
        return {name: digest for name, digest in self.files.digests.items() if kept[name]}


def read_problem(path: Path | str) -> Problem:
    """Read an experiment file and the files that it names.

    Relative names are looked for in the working directory, beside the file and one directory above it.
    """
    return problem_of(read_files(Path(path)))


def problem_of(files: Files) -> Problem:
    """Return the problem that the files state."""
    return Problem(
        topology=files.topology,
        workload=files.workload,
        objective=objective_of(files.experiment, files.experiment.planner),
        efficiencies=calibrated().with_measured(files.shares) if files.shares else calibrated(),
        files=files,
    )


def without(problem: Problem, sites: Collection[str]) -> Problem:
    """Return a problem that was read from files as it is without some sites; raises UsageError for one that is none."""
    files = problem._read
    known = [site.name for site in files.scenario.sites]
    for name in sites:
        if name not in known:
            raise UsageError(f'there is no site "{name}"{nearest(name, known)}')
    left = tuple(site for site in files.scenario.sites if site.name not in sites)
    if not left:
        raise UsageError(f"no site is left without {', '.join(sites)}")
    links = tuple(link for link in files.scenario.links if not {*link.between} & {*sites})
    return problem_of(replace(files, scenario=ScenarioFile(sites=left, links=links)))


def read_files(path: Path) -> Files:
    """Read an experiment file and all files that it names."""
    experiment, scenario = read_experiment(path)
    bases = _bases(path)
    measured = read_all(find(name, bases, f"{path}: topology.measured") for name in experiment.topology.measured)
    machines = {file: one for file, one in measured.items() if isinstance(one, Measured)}
    links = {file: one for file, one in measured.items() if isinstance(one, MeasuredLinks)}
    written = experiment.batch.response_lengths.path
    lengths = read_lengths(find(written, bases, "batch.response_lengths.path")) if written else ()
    return Files(experiment, with_measured_links(scenario, links.values()), tuple(lengths), machines, links)


def read_experiment(path: Path) -> tuple[Experiment, ScenarioFile]:
    """Read an experiment file and its sites, with the links as they are written, for whoever is yet to measure."""
    bases = _bases(path)
    experiment = _located(read_yaml(path, Experiment), bases)
    section = experiment.topology
    if section.scenario:
        scenario = read_scenario(find(section.scenario, bases, f"{path}: topology.scenario"))
    else:
        sites = [find(name, bases, f"{path}: topology.sites") for name in section.sites]
        links = find(section.links, bases, f"{path}: topology.links") if section.links else None
        scenario = read_sites(sites, links)
    names = [site.name for site in scenario.sites]
    known = [link_name(*pair) for pair in permutations(names, 2)]
    for name in experiment.launch.link_patience:
        if name not in known:
            raise UsageError(f'{path}: launch.link_patience: no link "{name}"{nearest(name, known)}')
    for name in experiment.checkpoints.copy_to:
        if name not in names:
            raise UsageError(f'{path}: checkpoints.copy_to: no site "{name}"{nearest(name, names)}')
    return experiment, scenario


def _located(experiment: Experiment, bases: Sequence[Path]) -> Experiment:
    """Return the experiment with the relative directories of models and data as they are seen from here."""
    return with_places(
        experiment, lambda value: str(next((base / value for base in bases if (base / value).exists()), value))
    )


def with_places(experiment: Experiment, place: Callable[[str], str]) -> Experiment:
    """Return the experiment with `place` of each name that may be that of a directory or file of models and data.

    What the catalogue of architectures has is none, whatever lies here under its name.
    """
    changes = {}
    for section, keys in PLACES.items():
        part = getattr(experiment, section)
        values = {key: value for key in keys if (value := getattr(part, key))}
        named = {key: place(value) for key, value in values.items() if not _in_catalogue(key, value)}
        changes[section] = part.model_copy(update=named)
    return experiment.model_copy(update=changes)


def _in_catalogue(key: str, value: str) -> bool:
    return key == "architecture" and value in architecture_catalogue()


def _bases(path: Path) -> list[Path]:
    """Return the directories in which an experiment's relative names are looked for."""
    return [Path(), path.parent, path.parent.parent]


def with_measured_links(scenario: ScenarioFile, files: Iterable[MeasuredLinks]) -> ScenarioFile:
    """Return the scenario with measured links in the place of written ones, or beside them."""
    links = {frozenset(link.between): link for link in scenario.links}
    names = {site.name for site in scenario.sites}
    for pair, (delay_ms, gbps) in delay_and_gbps(files).items():
        if pair <= names:  # a file may have links of further sites
            one, other = sorted(pair)
            links[pair] = LinkEntry(between=(one, other), delay_ms=delay_ms, gbps=gbps)
    return scenario.model_copy(update={"links": tuple(links.values())})


def objective_of(experiment: Experiment, planner: Planner) -> Objective:
    """Return what plans are chosen for: a section's objective and bounds, the run's steps and times."""
    rate, samples = planner.min_samples_per_second, experiment.batch.samples
    return Objective(
        planner.objective,
        max_iteration_seconds=samples / rate if rate else planner.max_iteration_seconds or math.inf,
        samples_per_iteration=samples if rate else None,
        budget_per_hour=planner.budget_per_hour or math.inf,
        steps=experiment.steps,
        walltime_seconds=max(experiment.launch.walltime_seconds, 1),  # 00:00:00 is a time, and a bound divides
        queue_timeout_seconds=max(experiment.launch.queue_timeout_seconds, 1),
        budget_gpu_hours=planner.budget_gpu_hours or math.inf,
    )


def workload_of(experiment: Experiment, lengths: Sequence[int] = ()) -> Workload:
    """Return what the planner needs to know of an experiment; UsageError for an unknown architecture.

    `lengths` are those of the file of response lengths, where it names one.
    """
    algorithm, actor = experiment.algorithm, architecture(experiment.model.architecture)
    critic = None
    if algorithm.kind == "ppo":
        critic = architecture(critic_of(experiment).architecture)
    return Workload(
        algorithm=algorithm.kind,
        mode=algorithm.mode,
        max_staleness=algorithm.max_staleness,
        samples=experiment.batch.samples,
        samples_per_prompt=algorithm.samples_per_prompt,
        prompt_tokens=experiment.batch.prompt_tokens,
        response=experiment.batch.response_lengths.to_lengths(experiment.batch.response_tokens, lengths),
        optimizer_steps_per_iteration=algorithm.minibatches * algorithm.epochs,
        epochs=algorithm.epochs,
        actor=actor,
        critic=critic,
        reference=actor if algorithm.kl_coefficient > 0 else None,
        reward=architecture(experiment.reward.architecture) if experiment.reward.architecture else None,
        weight_bytes=2 if experiment.model.dtype == "bf16" else 4,
        kl_in_reward=algorithm.kl_in_reward,
        ratio_to_sampler=algorithm.ratio_to_sampler,
        renews_contexts=algorithm.renews_contexts,
    )
