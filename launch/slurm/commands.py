"""What is run on a login node to submit and to cancel, and what the answers mean. Pure functions.

Jobs are found by their key, which is their name. Every command of Slurm has a deadline at the site, so that a
controller that hangs is an answer and not a lost connection. Times are asked for in UTC. Source: sbatch(1), squeue(1),
scancel(1).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from launch.remote import Part, parse, script
from launch.shell import final_line
from launch.slurm.run import HELD, SlurmSite
from launch.slurm.text import at_cluster, of_cluster

ASK_SECONDS = 25  # squeue, scancel: Slurm's clients themselves wait MessageTimeout (10 s by default), some repeatedly
SBATCH_SECONDS = 60
LOCK_SECONDS = 60
LOST_MINUTES = 10  # after which a job that sbatch did not answer about, and that Slurm does not list, comes no more
HELD_SECONDS = 60  # from SIGTERM to the members of a job until it holds its nodes
MANIFEST = "manifest.sha256"
# Never sent to a site: the jobs write them there, and what lies here is a copy.
WRITTEN_THERE = (
    *("events.jsonl", "metrics.jsonl", "samples.jsonl", "summary.json", "rollouts/", "checkpoints/"),
    *("logs/*", "jobs/", "ended/", "handed/", "*.endpoint", "peers/*"),
)
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}  # JOB STATE CODES of squeue(1)
GONE = "GONE"  # was listed and is no longer: Slurm forgets an ended job after MinJobAge (300 s by default)
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"}
UNANSWERED = 124  # the exit code of timeout(1)
# sbatch lost its controller, which may have taken the job all the same; and it never reached its controller.
_UNSURE = "timed out|zero bytes|communication"
_NEVER = "unable to contact|connection refused|connect failure|can't be reached"
NO_ANSWER = re.compile(f"{_UNSURE}|{_NEVER}", re.IGNORECASE)


@dataclass(frozen=True)
class Queued:
    """What Slurm says of a job, or of an element of an array or a component of a heterogeneous job."""

    job_id: str  # the one that scancel takes for the whole job
    submitted: str
    state: str
    reason: str
    start: float | None  # seconds since the epoch: the start, or Slurm's estimate of it
    nodes: str
    elements: tuple[tuple[str, int], ...] = ()  # of an array whose elements are in several states: how many in each

    @property
    def ended(self) -> bool:
        """Return whether nothing of the job waits or runs."""
        return self.state in ENDED or self.state == GONE

    @property
    def waiting(self) -> bool:
        """Return whether all of it still waits to start."""
        return self.state in _WAITING


def about_jobs(site: SlurmSite, *, held: bool = False) -> dict[str, str | int | Sequence[str]]:
    """Return what the scripts are given that list the jobs of the run, with those that `held` on to their nodes."""
    keys = [job.key for job in site.jobs] + [job.held_key for job in site.jobs if held]
    at = of_cluster(site.cluster)
    return {"directory": site.directory, "keys": ",".join(keys), "ask_seconds": ASK_SECONDS, "at": at}


def submit_script(site: SlurmSite, *, again: bool = False) -> str:
    """Submit the jobs that are not there yet, and say what is there afterwards; run twice, it does nothing twice.

    Those that have ended are not there if they are wanted `again`; then no job of an earlier run is taken over either.
    """
    jobs = ((job.name, job.key, "" if again else job.takes, str(max(job.tasks, 1))) for job in site.jobs)
    return script(
        *("jobs", "living", "submit"),
        **about_jobs(site),
        manifest=MANIFEST,
        lock_seconds=LOCK_SECONDS,
        sbatch_seconds=SBATCH_SECONDS,
        unanswered=UNANSWERED,
        unsure=_UNSURE,
        lost_minutes=LOST_MINUTES,
        earlier=site.earlier,
        held=HELD,
        held_seconds=HELD_SECONDS,
        jobs=[word for job in jobs for word in job],
        again="yes" if again else "",
        ended=sorted(ENDED),
    )


@dataclass(frozen=True)
class Taken:
    """What came of a submission: job name -> (id, submit time), and what went wrong with the first that failed."""

    jobs: Mapping[str, tuple[str, str]]
    problem: str = ""
    unreachable: bool = False  # the problem is that somebody did not answer, rather than a refusal


def parse_submitted(text: str, site: SlurmSite, *, again: bool = False) -> Taken:
    """Read what `submit_script` printed; a job that Slurm lists was taken, whatever sbatch said.

    Where jobs are wanted `again`, one that is listed as ended may be that of before, unless its id was written down.
    """
    parts = parse(text)
    listed = parts.get("listed", Part())
    if listed.code is None:
        return Taken({}, *_stopped(parts, text, site))
    known = {key: job for key, job in queued(parse_rows(listed.text)).items() if not (again and job.ended)}
    recorded = dict(line.split() for line in parts.get("recorded", Part()).text.splitlines() if len(line.split()) == 2)
    jobs = {}
    for job in site.jobs:
        if row := known.get(job.key):
            jobs[job.name] = (row.job_id, row.submitted)
        elif job.name in recorded:
            jobs[job.name] = (recorded[job.name], "")
    missing = [job.name for job in site.jobs if job.name not in jobs]
    if not missing:
        return Taken(jobs)
    # The first refusal ended the submission; what it was about may be listed all the same.
    refusal = next((part for name, part in parts.items() if name.startswith("refused ")), Part(code=0))
    silent = refusal.code == UNANSWERED or listed.code != 0
    why = last_line(refusal.text) or ("sbatch did not answer" if silent else f"sbatch ended with code {refusal.code}")
    unreachable = silent or bool(NO_ANSWER.search(refusal.text))
    return Taken(jobs, f"{site.name}: {missing[0]} was not accepted: {why}", unreachable)


def _stopped(parts: Mapping[str, Part], text: str, site: SlurmSite) -> tuple[str, bool]:
    """Return why a submission ended before its first sbatch, and whether somebody did not answer."""
    if "silent" in parts:
        said = last_line(parts["silent"].text) or f"no answer within {ASK_SECONDS} s"
        return f"{site.name}: squeue failed: {said}; try `{at_cluster('sinfo', site.cluster)}` there", True
    if "damaged" in parts:
        said = last_line(parts["damaged"].text)
        return f"{site.name}: {site.directory} is not what was sent: {said}; is its file system full?", False
    if "busy" in parts:
        return f"{site.name}: another submission of this run is still at work there; try again in a minute", True
    if "absent" in parts:
        return f"{site.name}: {site.directory} is not there; has it been cleaned up?", False
    return f"{site.name}: the submission ended without an answer: {last_line(text) or 'no output'}", True


def cancel_script(site: SlurmSite, remove: bool) -> str:
    """Cancel every job of the run that waits or runs; `remove` its directory too.

    A job that Slurm takes up late (a controller that hung during sbatch) then finds nothing and ends at once.
    """
    return script(
        *("jobs", "living", "cancel"),
        **about_jobs(site, held=True),
        lock_seconds=LOCK_SECONDS,
        removes="yes" if remove else "",
        ended=sorted(ENDED),
    )


def parse_cancelled(text: str, site: SlurmSite) -> tuple[int, str]:
    """Return how many jobs were cancelled, and what remains (nothing: "")."""
    parts = parse(text)
    asked = {name.removeprefix("cancel "): part for name, part in parts.items() if name.startswith("cancel ")}
    count = sum(part.code == 0 for part in asked.values())
    for job_id, part in asked.items():
        if part.code:
            return count, f"{site.name}: job {job_id}: {last_line(part.text) or 'scancel did not answer'}"
    if parts.get("tried", Part()).code is None:
        said = last_line(parts.get("silent", Part()).text) or "squeue did not answer"
        return count, f"{site.name}: {said}; its jobs are {', '.join(job.key for job in site.jobs)}"
    if "busy" in parts:
        return count, f"{site.name}: a submission is still at work there; what it submits yet is not cancelled"
    return count, ""


def parse_rows(text: str) -> list[tuple[str, Queued]]:
    """Return (key, what it says) of squeue's lines in the format that jobs.sh asks for; anything else is left out."""
    found = []
    for line in text.splitlines():
        cells = line.split("|", 6)
        if len(cells) == 7 and re.match(r"\d+", cells[0]):
            element, key, state, submitted, start, nodes, reason = cells
            job_id = re.split(r"[_+]", element)[0]
            elements = ((state, _count(element)),)
            found.append((key, Queued(job_id, submitted, state, reason, _seconds(start), nodes, elements)))
    return found


def _count(element: str) -> int:
    """Return how many elements of an array a line is about: those that wait share one, as `13_[0-3,7%2]`."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", element.partition("[")[2].partition("%")[0])
    return sum(max(int(last or first) - int(first) + 1, 1) for first, last in ranges) or 1


def _seconds(text: str) -> float | None:
    """Read a time of Slurm (in UTC) as seconds since the epoch."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def queued(rows: Iterable[tuple[str, Queued]]) -> dict[str, Queued]:
    """Return each job by its key, from the rows of its elements: alive while one of them is.

    Of one that was submitted again once it had ended, that is the last.
    """
    by_key: dict[str, dict[str, list[Queued]]] = {}
    for key, element in rows:
        by_key.setdefault(key, {}).setdefault(element.job_id, []).append(element)
    return {key: _whole(max(jobs.values(), key=_submission)) for key, jobs in by_key.items()}


def _submission(elements: Sequence[Queued]) -> tuple[str, int]:
    return elements[0].submitted, int(elements[0].job_id)


def _whole(elements: Sequence[Queued]) -> Queued:
    ordered = sorted(elements, key=_standing)
    first, counts = ordered[0], Counter[str]()
    for one in ordered:
        counts.update(dict(one.elements))
    nodes = ",".join(dict.fromkeys(one.nodes for one in elements if one.nodes))
    several = tuple(counts.items()) if len(counts) > 1 else ()
    return replace(first, job_id=elements[0].job_id, submitted=elements[0].submitted, nodes=nodes, elements=several)


def _standing(element: Queued) -> int:
    """Order elements by what they say of the job: one that runs, that waits, that failed, that is done."""
    if element.ended:
        return 3 if element.state == "COMPLETED" else 2
    return int(element.waiting)


def last_line(text: str) -> str:
    """Return the last line that says something, without the name of the program."""
    return re.sub(r"^\w+: (error: )?", "", final_line(text))
