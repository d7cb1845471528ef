"""What is run on a login node, one bash script per round trip, and what its answer means. Pure functions.

Jobs are found by their key, which is their name. Every command of Slurm has a deadline at the site, so that a
controller that hangs is an answer and not a lost connection. Times are asked for in UTC. Source: sbatch(1), squeue(1),
scancel(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath

from launch.slurm.run import SlurmSite
from launch.slurm.text import at_cluster

ASK_SECONDS = 25  # squeue, scancel: Slurm's clients themselves wait MessageTimeout (10 s by default), some repeatedly
SBATCH_SECONDS = 60
LOCK_SECONDS = 60
MANIFEST = "manifest.sha256"
# Never sent to a site: the jobs write them there, and what lies here is a copy.
WRITTEN_THERE = (
    *("events.jsonl", "metrics.jsonl", "summary.json", "checkpoints/", "logs/*", "jobs/", "ended/"),
    *("*.endpoint", "peers/*"),
)
_COLUMNS = "%i|%j|%T|%V|%S|%N|%r"
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
}  # JOB STATE CODES of squeue(1)
GONE = "GONE"  # was listed and is no longer: Slurm forgets an ended job after MinJobAge (300 s by default)
_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"}
_REFUSED = re.compile(r"refused \S+ (\d+)")
UNANSWERED = 124  # the exit code of timeout(1)
# sbatch lost its controller, which may have taken the job all the same; and it never reached its controller.
_UNSURE = "timed out|zero bytes|communication"
_NEVER = "unable to contact|connection refused|connect failure|can't be reached"
_NO_ANSWER = re.compile(f"{_UNSURE}|{_NEVER}", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One line of squeue: an element of an array, a component of a heterogeneous job, or a job."""

    job_id: str  # the one that scancel takes for the whole job
    key: str
    state: str
    submitted: str
    start: float | None  # seconds since the epoch: the start, or Slurm's estimate of it
    nodes: str
    reason: str


@dataclass(frozen=True)
class Queued:
    """What Slurm says of a job as a whole."""

    job_id: str
    submitted: str
    state: str
    reason: str
    start: float | None
    nodes: str

    @property
    def ended(self) -> bool:
        """Return whether nothing of the job waits or runs."""
        return self.state in ENDED or self.state == GONE

    @property
    def waiting(self) -> bool:
        """Return whether all of it still waits to start."""
        return self.state in _WAITING


def listing(site: SlurmSite) -> str:
    """Return the command that lists the jobs of the run, those that ended lately too."""
    keys = shlex.quote(",".join(job.key for job in site.jobs))
    options = f"--me --noheader --states=all --name={keys} --format={shlex.quote(_COLUMNS)}"
    return f"TZ=UTC timeout {ASK_SECONDS} {at_cluster('squeue', site.cluster)} {options}"


def submit_script(site: SlurmSite) -> str:
    """Submit the jobs that are not there yet, and say what is there afterwards; run twice, it does nothing twice.

    A job is there if the site wrote its id down, or if Slurm lists its key. One that sbatch was asked for and did not
    answer about is looked up and never asked for again: it may still come. One process at a time does this, for a
    launcher that was killed may have left one behind that is still at it; flock(1) ends with 1 then, and with another
    code on a file system without locks.
    """
    submits = " && ".join(f"submit {job.name} {shlex.quote(job.key)} scripts/{job.name}.sbatch" for job in site.jobs)
    return f"""\
cd {shlex.quote(site.directory)} 2>/dev/null || {{ echo '@ absent'; exit; }}
sha256sum --quiet --check {MANIFEST} >.damage 2>&1 || {{ echo '@ damaged'; head -n 3 .damage; exit; }}
exec 9>.submitting
flock --wait {LOCK_SECONDS} 9 2>/dev/null || [ $? -ne 1 ] || {{ echo '@ busy'; exit; }}
mkdir -p jobs
listed() {{ {listing(site)} 2>&1 9>&-; }}
before=$(listed) || {{ echo '@ silent'; echo "$before"; exit; }}
submit() {{
  if [ -s "jobs/$1" ]; then return; fi
  case "$before" in *"|$2|"*) return ;; esac
  if [ -e "jobs/$1.asked" ]; then echo "@ refused $1 {UNANSWERED}"; return 1; fi
  touch "jobs/$1.asked"
  id=$(timeout {SBATCH_SECONDS} sbatch --parsable "$3" 2>.error 9>&-)
  code=$?
  if [ "$code" -eq 0 ]; then echo "${{id%%;*}}" >"jobs/$1"; return; fi
  echo "@ refused $1 $code"; cat .error
  if [ "$code" -ne {UNANSWERED} ] && ! grep -qiE {shlex.quote(_UNSURE)} .error; then rm "jobs/$1.asked"; fi
  return 1
}}
{submits}
echo '@ recorded'
for job in jobs/*; do if [ -s "$job" ]; then echo "${{job#jobs/}} $(cat "$job")"; fi; done
echo '@ listed'
listed || echo '@ silent'
"""


@dataclass(frozen=True)
class Taken:
    """What came of a submission: job name -> (id, submit time), and what went wrong with the first that failed."""

    jobs: Mapping[str, tuple[str, str]]
    problem: str = ""
    unreachable: bool = False  # the problem is that somebody did not answer, rather than a refusal


def parse_submitted(text: str, site: SlurmSite) -> Taken:
    """Read what `submit_script` printed; a job that Slurm lists was taken, whatever sbatch said."""
    parts = parts_of(text)
    if "listed" not in parts:
        return Taken({}, *_stopped(parts, text, site))
    known = {row.key: row for row in parse_rows(parts["listed"])}
    recorded = dict(line.split() for line in parts.get("recorded", "").splitlines() if len(line.split()) == 2)
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
    refusals = ((match, said) for head, said in parts.items() if (match := _REFUSED.fullmatch(head)))
    code, said = next(((int(match[1]), said) for match, said in refusals), (0, ""))
    silent = code == UNANSWERED or "silent" in parts
    why = last_line(said) or ("sbatch did not answer" if silent else f"sbatch ended with code {code}")
    return Taken(jobs, f"{site.name}: {missing[0]} was not accepted: {why}", silent or bool(_NO_ANSWER.search(said)))


def _stopped(parts: Mapping[str, str], text: str, site: SlurmSite) -> tuple[str, bool]:
    """Return why a submission ended before its first sbatch, and whether somebody did not answer."""
    if "silent" in parts:
        said = last_line(parts["silent"]) or f"no answer within {ASK_SECONDS} s"
        return f"{site.name}: squeue failed: {said}; try `{at_cluster('sinfo', site.cluster)}` there", True
    if "damaged" in parts:
        said = last_line(parts["damaged"])
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
    own, of_run = (shlex.quote(str(path)) for path in (site.directory, PurePosixPath(site.directory).parent))
    scancel = f"timeout {ASK_SECONDS} {at_cluster('scancel', site.cluster)}"
    removal = f"rm -rf -- {own}; rmdir -- {of_run} 2>/dev/null" if remove else "true"
    return f"""\
rows=$({listing(site)} 2>&1)
code=$?
if [ "$code" -ne 0 ]; then
  {removal}
  echo '@ silent'; echo "$rows"; exit
fi
echo "$rows" | while IFS='|' read -r id key state rest; do
  case "$state" in {"|".join(sorted(ENDED))}|'') ;; *) echo "${{id%%[_+]*}}" ;; esac
done | sort -u | while read -r id; do
  if said=$({scancel} "$id" 2>&1 </dev/null); then echo "@ cancelled $id"; else
    echo "@ failed $id"; echo "$said"
  fi
done
{removal}
echo '@ done'
"""


def parse_cancelled(text: str, site: SlurmSite) -> tuple[int, str]:
    """Return how many jobs were cancelled, and what remains (nothing: "")."""
    parts = parts_of(text)
    count = sum(head.startswith("cancelled ") for head in parts)
    failed = {head: said for head, said in parts.items() if head.startswith("failed ")}
    for head, said in failed.items():
        return count, f"{site.name}: job {head.split()[1]}: {last_line(said) or 'scancel did not answer'}"
    if "done" not in parts:
        said = last_line(parts.get("silent", "")) or "squeue did not answer"
        return count, f"{site.name}: {said}; its jobs are {', '.join(job.key for job in site.jobs)}"
    return count, ""


def parse_rows(text: str) -> list[Row]:
    """Read squeue's lines of `_COLUMNS`; anything else is left out."""
    found = []
    for line in text.splitlines():
        cells = line.split("|", 6)
        if len(cells) == 7 and re.match(r"\d+", cells[0]):
            job_id = re.split(r"[_+]", cells[0])[0]
            found.append(Row(job_id, cells[1], cells[2], cells[3], _seconds(cells[4]), cells[5], cells[6]))
    return found


def _seconds(text: str) -> float | None:
    """Read a time of Slurm (in UTC) as seconds since the epoch."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def queued(rows: Sequence[Row]) -> dict[str, Queued]:
    """Return each job by its key, from the rows of its elements: alive while one of them is."""
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    return {key: _whole(elements) for key, elements in by_key.items()}


def _whole(rows: Sequence[Row]) -> Queued:
    first = min(rows, key=_standing)
    nodes = ",".join(dict.fromkeys(row.nodes for row in rows if row.nodes))
    return Queued(rows[0].job_id, rows[0].submitted, first.state, first.reason, first.start, nodes)


def _standing(row: Row) -> int:
    """Order elements by what they say of the job: one that runs, that waits, that failed, that is done."""
    if row.state in ENDED:
        return 3 if row.state == "COMPLETED" else 2
    return 1 if row.state in _WAITING else 0


def parts_of(text: str) -> dict[str, str]:
    """Return the parts of an answer by their heads: a line `@ head` begins each."""
    found = re.split(r"^@ (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def last_line(text: str) -> str:
    """Return the last line that says something, without the name of the program."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: (error: )?", "", lines[-1]) if lines else ""
