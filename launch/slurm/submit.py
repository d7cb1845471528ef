"""Submit a run's jobs at every site, or nowhere; run again after a crash, it adopts what is there.

intent of every job -> events
at every site at the same time:
    copy the site's directory                      (1 round trip)
    submit what is not there, say what is there    (1 round trip; once more where it ended without an answer)
all accepted -> events; else cancel at every site what was, remove the directories, raise; where an earlier launcher
submitted the run, raise alone: what it brought may train by now
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from hetrl.errors import HetrlError, SiteUnreachableError
from hetrl.files import EventLog
from launch.run_directory import Run
from launch.shell import LOGIN_BASH
from launch.slurm.commands import (
    ASK_SECONDS,
    HELD_SECONDS,
    LOCK_SECONDS,
    SBATCH_SECONDS,
    Taken,
    parse_submitted,
    submit_script,
)
from launch.slurm.discover import at_every_site
from launch.slurm.files import pack, send
from launch.slurm.run import SlurmRun, SlurmSite
from launch.slurm.watch import cancel_at, cancel_everywhere
from launch.state import State

_LEFT = "an earlier launcher submitted this run: nothing is withdrawn; resume it again, or cancel it"
AGAIN_SECONDS = 2.0  # before a second look at what a controller that did not answer in time has done


def submit_everywhere(
    run: Run, slurm: SlurmRun, events: EventLog, state: State, interrupted: Callable[[], int | None]
) -> None:
    """Bring the jobs that `state` does not know as accepted to their sites.

    Raises SiteUnreachableError where a site or its Slurm did not answer, HetrlError where it refused a job, and for a
    signal that came meanwhile; what had been accepted is cancelled by then, and the message says what could not be.
    Where `state` knows of jobs already, all of them go on.
    """
    first = not state.jobs
    accepted = {(job["site"], job["name"]) for job in state.jobs if job["id"] is not None}
    sites = [site for site in slurm.sites if any((site.name, job.name) not in accepted for job in site.jobs)]
    # The intent comes first: where this process dies at any moment after, its events say what may be there.
    for site in sites:
        pack(run.site(site.name))
        for job in site.jobs:
            if (site.name, job.name) not in accepted:
                events.append("submitting", site=site.name, job=job.name, key=job.key)
    try:
        answers, errors = at_every_site(sites, lambda site: submit_at(run.site(site.name), site))
        _note_taken(slurm, events, answers, accepted)
    except BaseException:  # Ctrl-C, too: a run is at all of its sites, or at none
        if first:
            _withdraw(slurm, events)
        raise
    refused = [taken for taken in answers.values() if taken.problem]
    if not refused and not errors and not interrupted():
        return
    problems = [taken.problem for taken in refused] + [str(error) for error in errors.values()]
    unreachable = any(taken.unreachable for taken in refused)
    unreachable |= any(isinstance(error, SiteUnreachableError) for error in errors.values())
    lines = [*(problems or ["interrupted while submitting"]), *(_withdraw(slurm, events) if first else [_LEFT])]
    raise (SiteUnreachableError if unreachable else HetrlError)("\n".join(lines))


def submit_again(run: Run, site: SlurmSite, events: EventLog) -> int:
    """Submit those jobs of a site once more that have ended; return how many are there.

    Raises SiteUnreachableError where the site or its Slurm did not answer, HetrlError where it refused a job; what it
    had accepted is cancelled by then.
    """
    for job in site.jobs:
        events.append("submitting", site=site.name, job=job.name, key=job.key)
    taken = submit_at(run.site(site.name), site, again=True)
    _note_jobs(site, taken, events)
    if taken.problem:
        _, remains = cancel_at(site, remove=False)
        problem = f"{taken.problem}\n{remains}" if remains else taken.problem
        raise (SiteUnreachableError if taken.unreachable else HetrlError)(problem)
    return len(taken.jobs)


def submit_at(directory: Path, site: SlurmSite, *, again: bool = False) -> Taken:
    """Copy a site's directory and submit its jobs; after no answer look again: what was asked for may have happened."""
    send(directory, site)
    taken = _ask(site, again)
    while taken.unreachable:
        time.sleep(AGAIN_SECONDS)
        before, taken = taken, _ask(site, again)
        if len(taken.jobs) <= len(before.jobs):  # more of them is progress: each time it goes on with what is left
            break
    return taken


def _ask(site: SlurmSite, again: bool) -> Taken:
    # Longer than all deadlines inside the script together: Slurm that hangs is an answer, and no lost connection.
    each = SBATCH_SECONDS + (HELD_SECONDS + 4 * ASK_SECONDS if site.earlier else 0)
    deadline = LOCK_SECONDS + 2 * ASK_SECONDS + each * len(site.jobs) + 10.0
    try:
        done = site.shell.run(LOGIN_BASH, stdin=submit_script(site, again=again), timeout_seconds=deadline)
    except SiteUnreachableError as error:
        return Taken({}, str(error), unreachable=True)
    return parse_submitted(done.stdout, site, again=again)


def _note_taken(
    slurm: SlurmRun, events: EventLog, answers: Mapping[str, Taken], accepted: Collection[tuple[str, str]]
) -> None:
    for site in slurm.sites:
        if site.name in answers:
            _note_jobs(site, answers[site.name], events, accepted)


def _note_jobs(
    site: SlurmSite, taken: Taken, events: EventLog, accepted: Collection[tuple[str, str]] = frozenset()
) -> None:
    for job in site.jobs:
        if job.name in taken.jobs and (site.name, job.name) not in accepted:
            job_id, submit_time = taken.jobs[job.name]
            identity = {"job_id": job_id, "submit_time": submit_time, "key": job.key}
            events.append("submitted", site=site.name, job=job.name, job_kind=job.kind, **identity)


def _withdraw(slurm: SlurmRun, events: EventLog) -> list[str]:
    """Cancel what any site has accepted, and remove the run from it; return lines that say what was done."""
    count, remains = cancel_everywhere(slurm, remove=True)
    events.append("withdrawn", jobs=count, remains=remains)
    lines = [f"{count} job{'s' if count > 1 else ''} that had been accepted: cancelled"] if count else []
    if remains:
        lines += ["not undone (run `hetrl cancel` when these answer):", *(f"  {line}" for line in remains)]
    return lines
