"""Where a run lies at its Slurm sites: `slurm.json` in the run directory, written before anything is submitted.

Every verb finds a run's jobs by it, whatever became of the experiment and site files since.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from hetrl.config import Problem
from hetrl.errors import HetrlError
from hetrl.experiment import seconds_of
from hetrl.files import replace_json
from launch.run_directory import Run
from launch.shell import Shell

if TYPE_CHECKING:
    from launch.slurm_stage import Prepared


@dataclass(frozen=True)
class SlurmJob:
    """One submission; Slurm knows it by `key`, its job name. `tasks` is the size of an array, 0 for a gang."""

    name: str
    kind: str
    key: str
    nodes: int
    gpus: int
    tasks: int


@dataclass(frozen=True)
class SlurmSite:
    """One site's jobs, and the directory (absolute, at the cluster) from which they run.

    `cluster` is the one that Slurm's -M names, None for that of the login node.
    """

    name: str
    host: str
    directory: str
    jobs: tuple[SlurmJob, ...]
    cluster: str | None = None

    @cached_property
    def shell(self) -> Shell:
        """Return the site's command line."""
        return Shell(self.name, self.host)


@dataclass(frozen=True)
class Carried:
    """A file that the launcher brings from one site to another whenever it changes: where a gateway listens.

    `origin` (at `source`) and `destination` (at `target`) are absolute paths.
    """

    source: str
    target: str
    origin: str
    destination: str


@dataclass(frozen=True)
class SlurmRun:
    """All sites of a run, the lead site first."""

    sites: tuple[SlurmSite, ...]
    carried: tuple[Carried, ...]
    poll_seconds: float
    gang_timeout_seconds: float

    @property
    def lead(self) -> SlurmSite:
        """Return the site whose gang holds the controller."""
        return self.sites[0]

    def site(self, name: str) -> SlurmSite:
        """Return the site of this name."""
        return next(site for site in self.sites if site.name == name)


def describe(problem: Problem, prepared: Prepared, site_order: Sequence[str]) -> SlurmRun:
    """Write `slurm.json` of a prepared run and return what it says."""
    files = {site.name: site for site in problem.scenario.sites}
    sites = tuple(
        SlurmSite(
            name,
            files[name].ssh,
            prepared.directories[name],
            tuple(
                SlurmJob(script.name, script.kind, script.key, script.nodes, script.gpus, script.array_tasks)
                for script in prepared.scripts
                if script.site == name
            ),
            files[name].cluster,
        )
        for name in site_order
    )
    launch = problem.experiment.launch
    described = SlurmRun(sites, prepared.carried, launch.poll_seconds, seconds_of(launch.gang_timeout))
    replace_json(prepared.run.slurm, asdict(described))
    return described


def read_slurm_run(run: Run) -> SlurmRun | None:
    """Return where a run lies at its Slurm sites, None for one of the local executor."""
    try:
        return msgspec.convert(json.loads(run.slurm.read_text()), SlurmRun)
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.ValidationError) as error:
        raise HetrlError(f"{run.slurm}: cannot be read ({error}); its jobs are those named hetrl-{run.id}-*") from None
