"""Where a run lies at its Slurm sites: `slurm.json` in the run directory, written before anything is submitted.

Every verb finds a run's jobs by it, whatever became of the experiment and site files since.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

import msgspec

from hetrl.errors import HetrlError
from hetrl.files import replace_json
from launch.run_directory import Run
from launch.shell import Shell

HELD = "held-"  # stands before the name of a job that keeps its nodes once its run has failed


@dataclass(frozen=True)
class SlurmJob:
    """One submission; Slurm knows it by `key`, its job name. `tasks` is the size of an array, 0 for a gang.

    One that is `spare` has but replicas of generation, and perhaps a gateway. Where the run goes on from another one,
    `takes` is the key of the job there whose nodes this one takes over, if it still has them.
    """

    name: str
    kind: str
    key: str
    nodes: int
    gpus: int
    tasks: int
    spare: bool = False
    takes: str = ""

    @property
    def held_key(self) -> str:
        """Return the name of the job once the run has failed and it keeps its nodes (`handing_on.sh.j2`)."""
        return f"{HELD}{self.key}"


@dataclass(frozen=True)
class SlurmSite:
    """One site's jobs, and the directory (absolute, at the cluster) from which they run.

    `cluster` is the one that Slurm's -M names, None for that of the login node. `earlier` is the directory of the run
    that this one goes on from, where its jobs hand over their nodes.
    """

    name: str
    host: str
    directory: str
    jobs: tuple[SlurmJob, ...]
    cluster: str | None = None
    earlier: str = ""

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
    queue_timeout_seconds: float
    begins_without_spare: bool = False

    @property
    def lead(self) -> SlurmSite:
        """Return the site whose gang holds the controller."""
        return self.sites[0]

    def site(self, name: str) -> SlurmSite:
        """Return the site of this name."""
        return next(site for site in self.sites if site.name == name)


def write_slurm_run(run: Run, slurm: SlurmRun) -> None:
    """Write where a run lies, before anything of it is submitted."""
    replace_json(run.slurm, asdict(slurm))


def read_slurm_run(run: Run) -> SlurmRun | None:
    """Return where a run lies at its Slurm sites, None for one of the local executor."""
    try:
        return msgspec.convert(json.loads(run.slurm.read_text()), SlurmRun)
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.ValidationError) as error:
        raise HetrlError(f"{run.slurm}: cannot be read ({error}); its jobs are those named hetrl-{run.id}-*") from None
