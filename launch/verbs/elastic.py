"""The verbs that give the GPUs of a site's rollouts back while a run goes on, and take them again."""

from __future__ import annotations

import argparse
from dataclasses import replace

from hetrl.errors import PartialError, SiteUnreachableError, UsageError
from hetrl.files import EventLog
from hetrl.plan.document import read_plan
from hetrl.runtime.run.deaths import RELEASED
from hetrl.runtime.wire import site_of
from hetrl.runtime.wire.members import addresses_of
from hetrl.workload import ACTOR_GENERATION
from launch.run_directory import Run, find_run
from launch.slurm.run import SlurmSite, read_slurm_run
from launch.slurm.submit import submit_again
from launch.slurm.watch import cancel_at, living_jobs, refresh
from launch.state import State

TELL_SECONDS = 60.0


def release_command(arguments: argparse.Namespace) -> int:
    """Cancel the jobs of a site that have but rollouts; the run goes on without them."""
    run, lead, site, state = _asked(arguments, "release")
    if not _generates_elsewhere(run, site.name, state):
        raise UsageError(f"{site.name}: the only rollouts that the run has left are there; `hetrl cancel` ends the run")
    _tell_controller(lead, site.name, released=True)
    count, remains = cancel_at(site, remove=False)
    if remains:
        raise PartialError(remains)
    EventLog(run.events, "release").append("released", site=site.name)
    print(f"{site.name}: {count} job{'' if count == 1 else 's'} cancelled; {run.id} goes on without its rollouts")
    return 0


def add_command(arguments: argparse.Namespace) -> int:
    """Submit those jobs of a site again that have but rollouts and have ended; they join the run."""
    run, lead, site, state = _asked(arguments, "add")
    living = {job["name"] for job in living_jobs(state) if job["site"] == site.name}
    ended = tuple(job for job in site.jobs if job.name not in living)
    if not ended:
        print(f"{site.name}: its rollouts have not ended: {', '.join(job.name for job in site.jobs)}")
        return 0
    _tell_controller(lead, site.name, released=False)
    count = submit_again(run, replace(site, jobs=ended), EventLog(run.events, "add"))
    jobs = f"{count} job{'' if count == 1 else 's'}"
    print(f"{site.name}: {jobs} submitted; their rollouts join {run.id} when they start")
    return 0


def _tell_controller(lead: SlurmSite, site: str, *, released: bool) -> None:
    """Let the lead site's directory say whose rollouts were given back: the controller takes them for no fault.

    Raises SiteUnreachableError or HetrlError where it cannot be said; nothing is cancelled or submitted then.
    """
    note = f"{lead.directory}/{RELEASED}{site}"
    command = ["touch", note] if released else ["rm", "-f", note]
    lead.shell.check(command, timeout_seconds=TELL_SECONDS, doing=f"tell the controller of {site}")


def _asked(arguments: argparse.Namespace, verb: str) -> tuple[Run, SlurmSite, SlurmSite, State]:
    """Return the run, its lead site, and the site that is meant, with those of its jobs that the run can do without."""
    run = find_run(arguments.run)
    slurm = read_slurm_run(run)
    if slurm is None:
        raise UsageError(f"{run.id} is a run of the local executor, whose sites are this machine: nothing to {verb}")
    names = [site.name for site in slurm.sites]
    if arguments.site not in names:
        raise UsageError(f"{arguments.site} is no site of {run.id}; there are {', '.join(names)}")
    site = slurm.site(arguments.site)
    site = replace(site, jobs=tuple(job for job in site.jobs if job.spare))
    if not site.jobs:
        raise UsageError(f"{site.name} trains or scores, and the run cannot go on without; it has no job to {verb}")
    state = refresh(run, slurm, verb)
    if state.phase != "running":
        raise UsageError(f"{run.id} is {state.phase}; `hetrl {verb}` is for a run that goes on")
    if site.name in state.silent:
        raise SiteUnreachableError(f"{site.name}: does not answer: {state.silent[site.name]}")
    return run, slurm.lead, site, state


def _generates_elsewhere(run: Run, site: str, state: State) -> bool:
    """Return whether replicas of generation run at another site."""
    replicas = addresses_of(read_plan(run.path / "plan.json"), ACTOR_GENERATION)
    return any(state.members.get(one) == "running" for one in replicas if site_of(one) != site)
