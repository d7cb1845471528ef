"""Look at a run's Slurm sites, and end its jobs there: for its executor, and for `status`, `logs` and `cancel`.

A look is one command at a site: what Slurm says of the jobs, and the new bytes of their files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from hetrl.errors import HetrlError, PartialError, SiteUnreachableError
from hetrl.files import EventLog
from launch.collect import Collector
from launch.remote import script
from launch.run_directory import Run
from launch.shell import BASH, LOGIN_BASH
from launch.show import job_standing
from launch.slurm.commands import ENDED, GONE, LOCK_SECONDS, cancel_script, parse_cancelled
from launch.slurm.discover import at_every_site
from launch.slurm.files import Mirror
from launch.slurm.jobs import jobs_of
from launch.slurm.poll import GROWING, Look, parse_poll, poll_script
from launch.slurm.run import SlurmRun, SlurmSite
from launch.state import CANCELLED, FINISHED, State

LOOK_SECONDS = 60.0  # squeue has ASK_SECONDS of it; the files come after its answer
CANCEL_SECONDS = 120.0 + LOCK_SECONDS
CARRY_SECONDS = 30.0


def look_at(run: Run, site: SlurmSite, logs: bool = True) -> Look:
    """Look at a site and bring home what its jobs wrote; a site that cannot be reached is a look without jobs.

    What it says of its jobs is not ahead of what these told: events and metrics are read to their end.
    """
    look = last = _look_once(run, site, logs)
    while last.jobs is not None and any(one.name in GROWING and not one.reaches_end for one in last.chunks):
        last = _look_once(run, site, logs=False)
    return look if last.jobs is not None else last


def _look_once(run: Run, site: SlurmSite, logs: bool) -> Look:
    mirror = Mirror(run, site.name)
    try:
        question = poll_script(site, mirror.offsets(), logs)
        done = site.shell.run(LOGIN_BASH, stdin=question, timeout_seconds=LOOK_SECONDS)
        look = parse_poll(done.stdout)
        mirror.write(look.chunks)
    except (HetrlError, OSError) as error:
        return Look(None, (), str(error))
    return look


def carry(run: Run, slurm: SlurmRun, site: SlurmSite, carried: dict[str, str]) -> None:
    """Bring the endpoint of a site's gateway to those that dial it directly, when it has changed.

    `carried` is what each destination has; one that cannot be reached is tried again at the next look.
    """
    for each in (each for each in slurm.carried if each.source == site.name):
        here = run.site(site.name) / PurePosixPath(each.origin).name
        endpoint = here.read_text() if here.exists() else ""
        if not endpoint or carried.get(each.destination) == endpoint:
            continue
        there = PurePosixPath(each.destination)
        writing = script("write_files", directory=str(there.parent), files=[there.name, endpoint])
        doing = f"tell it where the gateway of {site.name} is"
        try:
            slurm.site(each.target).shell.check(BASH, stdin=writing, timeout_seconds=CARRY_SECONDS, doing=doing)
        except HetrlError:
            continue
        carried[each.destination] = endpoint


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


def cancel_everywhere(slurm: SlurmRun, remove: bool = False) -> tuple[int, list[str]]:
    """Cancel the jobs of the run at all sites; return how many there were, and a line for each site not done.

    `remove` deletes the run's directories there too, so that what a site takes up late finds nothing.
    """

    answers, errors = at_every_site(slurm.sites, lambda site: cancel_at(site, remove))
    remains = [said for _, said in answers.values() if said] + [str(error) for error in errors.values()]
    return sum(count for count, _ in answers.values()), remains


def cancel_at(site: SlurmSite, remove: bool) -> tuple[int, str]:
    """Cancel the jobs of one site; return how many there were, and what remains (nothing: "")."""
    done = site.shell.run(LOGIN_BASH, stdin=cancel_script(site, remove), timeout_seconds=CANCEL_SECONDS)
    return parse_cancelled(done.stdout, site)


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
    # Said before it is done: a launcher takes no cancelled job for a failure then, and takes up no run that failed.
    if state.phase not in (FINISHED, CANCELLED):
        EventLog(run.events, "cancel").append("cancelled", cause="cancelled with hetrl cancel")
    count, remains = cancel_everywhere(slurm)
    state = refresh(run, slurm, "cancel")
    done = f"{run.id} is {state.phase}; {count} job{'' if count == 1 else 's'} cancelled"
    if not remains:
        return done
    kind = SiteUnreachableError if len(remains) == len(slurm.sites) else PartialError
    raise kind("\n".join([f"{done}; what follows may live on, cancel again when it answers:", *remains]))
