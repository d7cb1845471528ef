"""Reading an experiment file and the files that it names, and the problem that they make together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetrl.describe.experiment import Experiment
from hetrl.describe.measured import Measured, merge
from hetrl.describe.measured_files import read_all
from hetrl.describe.measured_links import MeasuredLinks, delay_and_gbps
from hetrl.describe.sites import LinkEntry, ScenarioFile, read_scenario, read_sites, topology_of
from hetrl.describe.yaml_file import find, read_yaml
from hetrl.hardware import Topology
from hetrl.workload import Workload, architecture


@dataclass(frozen=True)
class Problem:
    """An experiment, and the sites and the measured files that it names.

    The links of scenario and topology are the measured ones where there are such.
    """

    experiment: Experiment
    scenario: ScenarioFile
    topology: Topology
    workload: Workload
    measured: Mapping[Path, Measured] = field(default_factory=dict)
    measured_links: Mapping[Path, MeasuredLinks] = field(default_factory=dict)

    @property
    def digests(self) -> dict[str, str]:
        """Return the sha256 of experiment and topology, the measured shares included, as a plan records them."""
        topology = self.scenario.model_dump(mode="json")
        shares = merge(self.measured.values())
        return {
            "experiment": _digest(self.experiment.model_dump(mode="json")),
            "topology": _digest({**topology, "measured": shares} if shares else topology),
        }


def _digest(document: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read_problem(path: Path) -> Problem:
    """Read an experiment file and the topology files that it names.

    Relative names are looked for in the working directory, beside the file and one directory above it.
    """
    experiment, scenario = read_experiment(path)
    bases = _bases(path)
    named = experiment.topology.measured
    measured = read_all(find(name, bases, f"{path}: topology.measured") for name in named)
    machines = {file: one for file, one in measured.items() if isinstance(one, Measured)}
    links = {file: one for file, one in measured.items() if isinstance(one, MeasuredLinks)}
    scenario = with_measured_links(scenario, links.values())
    return Problem(experiment, scenario, topology_of(scenario), workload_of(experiment, bases), machines, links)


def read_experiment(path: Path) -> tuple[Experiment, ScenarioFile]:
    """Read an experiment file and its sites, with the links as they are written, for whoever is yet to measure."""
    experiment = read_yaml(path, Experiment)
    section, bases = experiment.topology, _bases(path)
    if section.scenario:
        return experiment, read_scenario(find(section.scenario, bases, f"{path}: topology.scenario"))
    sites = [find(name, bases, f"{path}: topology.sites") for name in section.sites]
    links = find(section.links, bases, f"{path}: topology.links") if section.links else None
    return experiment, read_sites(sites, links)


def _bases(path: Path) -> list[Path]:
    """Return the directories in which an experiment's relative names are looked for."""
    return [Path(), path.parent, path.parent.parent]


def with_measured_links(scenario: ScenarioFile, files: Iterable[MeasuredLinks]) -> ScenarioFile:
    """Return the scenario with measured links in the place of written ones, or beside them."""
    links = {frozenset(link.between): link for link in scenario.links}
    names = {site.name for site in scenario.sites}
    for pair, (delay_ms, gbps) in delay_and_gbps(files).items():
        if pair <= names:
            one, other = sorted(pair)
            links[pair] = LinkEntry(between=(one, other), delay_ms=delay_ms, gbps=gbps)
    return scenario.model_copy(update={"links": tuple(links.values())})


def workload_of(experiment: Experiment, bases: Sequence[Path] = (Path(),)) -> Workload:
    """Return what the planner needs to know of an experiment; UsageError for an unknown architecture.

    A file of response lengths is looked for in `bases`.
    """
    algorithm, actor = experiment.algorithm, architecture(experiment.model.architecture)
    critic = None
    if algorithm.kind == "ppo":
        critic = architecture(experiment.critic.architecture) if experiment.critic else actor
    lengths = experiment.batch.response_lengths
    path = find(lengths.path, bases, "batch.response_lengths.path") if lengths.path else None
    return Workload(
        algorithm=algorithm.kind,
        mode=algorithm.mode,
        max_staleness=algorithm.max_staleness,
        samples=experiment.batch.samples,
        samples_per_prompt=algorithm.samples_per_prompt,
        prompt_tokens=experiment.batch.prompt_tokens,
        response=lengths.to_lengths(experiment.batch.response_tokens, path),
        optimizer_steps_per_iteration=algorithm.minibatches * algorithm.epochs,
        epochs=algorithm.epochs,
        actor=actor,
        critic=critic,
        reference=actor if algorithm.kl_coefficient > 0 else None,
        reward=architecture(experiment.reward.architecture) if experiment.reward.architecture else None,
        weight_bytes=2 if experiment.model.dtype == "bf16" else 4,
    )
