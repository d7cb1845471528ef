"""What becomes of a run's jobs: from one look at a site after another to events, and to the jobs that ended.

A site that does not answer is UNKNOWN, never done: its jobs stay what they were. A job has ended where Slurm answers
and says so, or no longer lists it. Once the run has finished, the launcher ends what is left of it: Slurm calls
such a job CANCELLED, but it has done what it was for, and counts as COMPLETED.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hetrl.errors import GangTimeoutError
from hetrl.files import EventLog
from hetrl.runtime.wire import CONTROLLER
from launch.executor import Exit, Started
from launch.render import GANG
from launch.slurm.commands import GONE, Queued
from launch.slurm.poll import Look
from launch.slurm.run import SlurmJob, SlurmRun, SlurmSite
from launch.state import State

START_MARGIN_SECONDS = 60.0  # the controller, which counts for itself, is first to say who is missing


@dataclass
class Jobs:
    """The jobs of a run as they were at the last look; `seen` by key, `silent` sites with what was said instead.

    `told` are the keys of the jobs whose end was returned, `looked` the sites that answered or did not. `finished` says
    that the run has: what is cancelled from then on did not fail.
    """

    slurm: SlurmRun
    events: EventLog
    seen: dict[str, Queued]
    silent: dict[str, str]
    finished: bool = False
    told: set[str] = field(default_factory=set)
    looked: set[str] = field(default_factory=set)

    def note(self, site: SlurmSite, look: Look) -> list[Exit]:
        """Write an event for each job that changed, or for a site that fell silent; return the jobs that ended."""
        self.looked.add(site.name)
        if look.jobs is None:
            if site.name not in self.silent:
                self.events.append("site_silent", site=site.name, cause=look.problem)
            self.silent[site.name] = look.problem
            return []
        if self.silent.pop(site.name, None) is not None:
            self.events.append("site_answers", site=site.name)
        return [gone for job in site.jobs if (gone := self._note_job(site, job, look.jobs))]

    def _note_job(self, site: SlurmSite, job: SlurmJob, listed: Mapping[str, Queued]) -> Exit | None:
        before, after = self.seen.get(job.key), listed.get(job.key)
        if after is None:
            if before is None:
                return None  # not submitted
            after = before if before.ended else replace(before, state=GONE, reason="None", start=None, elements=())
        if self.finished and after.state == "CANCELLED" and not (before and before.state == "CANCELLED"):
            after = replace(after, state="COMPLETED", reason="None", elements=())
        if before is None or _told(after) != _told(before):
            self._write(site, job, after)
        self.seen[job.key] = after
        if not after.ended or job.key in self.told:
            return None
        self.told.add(job.key)
        reason = f" ({after.reason})" if after.reason not in ("None", "") else ""
        # How a job ended that is GONE nobody saw: alone it is no error.
        code = int(after.state not in ("COMPLETED", GONE))
        return Exit(self._started(site, job), code, f"job {after.job_id} ended: {after.state}{reason}")

    def _started(self, site: SlurmSite, job: SlurmJob) -> Started:
        """Return a job with its role: that of the lead site's gang is the controller's."""
        leads = job.kind == GANG and site == self.slurm.lead
        return Started(site.name, job.name, CONTROLLER if leads else job.kind, job.name, job.spare)

    def _write(self, site: SlurmSite, job: SlurmJob, found: Queued) -> None:
        start = None if found.start is None else round(found.start)
        self.events.append(
            "job_state",
            site=site.name,
            job=job.name,
            job_id=found.job_id,
            submit_time=found.submitted,
            state=found.state,
            reason=found.reason,
            start=start,
            nodes=found.nodes,
            elements=dict(found.elements),
        )

    def alive(self) -> list[Started]:
        """Return what has not ended as far as is known."""
        return [self._started(site, job) for site, job, found in self._known() if not found.ended]

    def _known(self) -> Iterator[tuple[SlurmSite, SlurmJob, Queued]]:
        for site in self.slurm.sites:
            for job in site.jobs:
                if found := self.seen.get(job.key):
                    yield site, job, found

    def check_start(self, timeout_seconds: float) -> None:
        """Raise GangTimeoutError where some jobs have held their nodes so long while others still wait for theirs.

        Nothing is concluded before every site has been seen, or while the lead site, which knows of GO, is silent.
        """
        if len(self.looked) < len(self.slurm.sites) or self.slurm.lead.name in self.silent:
            return
        known = [each for each in self._known() if each[0].name not in self.silent]
        # One that took its nodes over has had them since before this run; the controller counts for those.
        held = (found for _, job, found in known if not job.takes and found.state == "RUNNING")
        started = [found.start for found in held if found.start is not None]
        waiting = [(site, job, found) for site, job, found in known if found.waiting]
        if self.slurm.begins_without_spare:
            waiting = [each for each in waiting if not each[1].spare]
        if not started or not waiting:
            return
        if time.time() - min(started) > timeout_seconds + START_MARGIN_SECONDS:
            late = "; ".join(f"{site.name}: {job.name} still waits ({found.reason})" for site, job, found in waiting)
            raise GangTimeoutError(
                f"{late}; the nodes of the others are given back after {timeout_seconds:g} s: "
                "plan without that site, or raise launch.queue_timeout"
            )


def _told(found: Queued) -> tuple[object, ...]:
    """Return what makes a change: an estimate of the start moves all the time."""
    return found.state, found.reason, found.nodes, found.elements


def jobs_of(slurm: SlurmRun, events: EventLog, state: State) -> Jobs:
    """Return the jobs as the run's state knows them."""
    keys = {(site.name, job.name): job.key for site in slurm.sites for job in site.jobs}
    seen = {
        keys[job["site"], job["name"]]: Queued(
            *(job["id"], job["submit_time"], job["state"], job["reason"], job["start"], job["nodes"]),
            tuple(job["elements"].items()),
        )
        for job in state.jobs
        if job["id"] is not None
    }
    return Jobs(slurm, events, seen, dict(state.silent), finished=state.phase == "finished")
