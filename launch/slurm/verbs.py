"""What `status`, `logs` and `cancel` do for a run at Slurm sites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hetrl.errors import PartialError, SiteUnreachableError
from hetrl.events import EventLog
from launch.collect import Collector
from launch.run_directory import Run
from launch.show import job_standing
from launch.slurm.commands import ENDED, GONE
from launch.slurm.discover import at_every_site
from launch.slurm.jobs import jobs_of
from launch.slurm.run import SlurmRun
from launch.slurm.watch import cancel_everywhere, look_at
from launch.state import State


def refresh(run: Run, slurm: SlurmRun, source: str, logs: bool = False) -> State:
    """Look at every site once and return the run's state; `source` names the verb in the events."""
    collector = Collector(run, slurm.lead.name)
    collector.collect()
    looks, _ = at_every_site(slurm.sites, lambda site: look_at(run, site, logs))
    jobs = jobs_of(slurm, EventLog(run.events, source), collector.state)
    for site in slurm.sites:
        jobs.note(site, looks[site.name])
    collector.collect()
    return collector.state


def fetch_logs(run: Run, slurm: SlurmRun) -> None:
    """Bring every log home as far as it is written; a site that cannot be reached is left out."""
    waiting = list(slurm.sites)
    while waiting:
        looks, _ = at_every_site(waiting, lambda site: look_at(run, site))
        waiting = [site for site in waiting if not looks[site.name].complete]


def living_jobs(state: State) -> list[Mapping[str, Any]]:
    """Return the jobs that have not ended as far as is known."""
    return [job for job in state.jobs if job["id"] is not None and job["state"] not in (*ENDED, GONE)]


def job_rows(state: State) -> Iterator[tuple[str, str]]:
    """Yield what `status` shows of each job as (name, value) rows."""
    for job in state.jobs:
        number = f"{job['id']}  " if job["id"] is not None else ""
        standing = job_standing(job)
        if job["site"] in state.silent:
            standing = f"UNKNOWN, was {standing}"
        yield "job", f"{job['site']}/{job['name']}  {number}{standing}"
    yield from (("silent", said) for said in state.silent.values())


def cancel_jobs(run: Run, slurm: SlurmRun) -> str:
    """Cancel a run at every site and return what was done.

    Raises PartialError where some sites could not be reached, SiteUnreachableError where none could: the message says
    what may live on. The run counts as cancelled all the same, and a second `cancel` tries the others again.
    """
    state = refresh(run, slurm, "cancel")
    if not state.ended:
        EventLog(run.events, "cancel").append("cancelled", cause="cancelled with hetrl cancel")
    count, remains = cancel_everywhere(slurm)
    state = refresh(run, slurm, "cancel")
    done = f"{run.id} is {state.phase}; {count} job{'' if count == 1 else 's'} cancelled"
    if not remains:
        return done
    kind = SiteUnreachableError if len(remains) == len(slurm.sites) else PartialError
    raise kind("\n".join([f"{done}; what follows may live on, cancel again when it answers:", *remains]))
