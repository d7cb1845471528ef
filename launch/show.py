"""What a run's events, a search and a plan's costs say to a reader: one line of text each, or none."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetrl.cost.charges import held_by_site, price_per_hour
from hetrl.hardware import Topology
from hetrl.plan.plan import Plan
from hetrl.report.text import figure
from hetrl.workload import GENERATION_WAIT, INFERENCES, TRAININGS

if TYPE_CHECKING:  # numpy and pulp, which the search brings, are slow to load
    from hetrl.search.limits import Progress

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NAMES_ERROR = re.compile(r"(\b\w*(Error|Exception|Interrupt)\b|\berror\b|\bfatal\b)[:(\s]", re.IGNORECASE)
_QUIET = re.compile(r"\b(DEBUG|INFO|WARN(ING)?)\b")  # the level of a logger, near the beginning of a line
_LEVEL_LETTERS = 80
_STACK_FOLLOWS = ", error stack:"  # as MPICH says it; then a line for each function, the deepest last
_FRAME = re.compile(r"\w+\(\d+\)\.*:")
_TAIL_BYTES = 65536


class Lines:
    """Turns events into lines; it remembers the weight version that a step's line shows."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._version: int | None = None

    def line(self, event: Mapping[str, Any]) -> str | None:
        """Return what an event says, None where it says nothing to a reader."""
        if event["kind"] == "weights_published":
            self._version = event["version"]
        return step_line(event, self._version) if event["kind"] == "step" else _line(event)


def step_line(event: Mapping[str, Any], version: int | None) -> str:
    """Return `step 12/40  reward 0.53  3.1 s (gen 1.2, infer 0.3, train 0.8, sync 0.4)  v12`.

    What is in brackets is how the step spent its seconds: `gen` is what it waited for generation.
    """
    seconds = event["seconds"]
    parts = {
        "gen": [GENERATION_WAIT],
        "infer": INFERENCES,
        "train": TRAININGS,
        "sync": ("weight_sync",),
    }
    spent = {name: sum(seconds.get(task, 0.0) for task in tasks) for name, tasks in parts.items()}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in spent.items() if value >= 0.05)
    width = len(str(event["of"]))
    line = f"step {event['step']:>{width}}/{event['of']}  reward {event['reward']:.2f}  {seconds['iteration']:.1f} s"
    return line + (f" ({shown})" if shown else "") + ("" if version is None else f"  v{version}")


def _line(event: Mapping[str, Any]) -> str | None:
    return _line_of_a_job(event) or _line_of_a_member(event) or _line_of_the_run(event)


def _line_of_a_job(event: Mapping[str, Any]) -> str | None:
    match event["kind"]:
        case "submitted" if "job_id" in event:
            return f"{event['site']}: {event['job']} is job {event['job_id']}"
        case "submitted":
            count = len(event["processes"])
            return f"{event['site']}: {event['job']} started, {count} process{'es' if count > 1 else ''}"
        case "restarted":
            return f"{event['site']}: {event['process']['name']} was ended by {event['signal']} and started again"
        case "job_state":
            return f"{event['site']}: {event['job']} {job_standing(event)}"
        case "site_silent":
            return f"{event['site']}: UNKNOWN, its jobs go on: {event['cause']}"
        case "site_answers":
            return f"{event['site']}: answers again"
    return None


def _line_of_a_member(event: Mapping[str, Any]) -> str | None:
    match event["kind"]:
        case "member_ready":
            engines = ", ".join(f"{name} {version}" for name, version in event.get("engines", {}).items())
            return f"{event['member']} is ready" + (f" ({engines})" if engines else "")
        case "replica_lost":
            return f"{event['member']} is lost, its samples are drawn elsewhere: {event['cause']}"
        case "replica_released":
            return f"{event['member']} is given back, its samples are drawn elsewhere"
        case "replica_back":
            return f"{event['member']} was started again, and draws as soon as it has the newest weights"
        case "replicas_behind":
            causes = "; ".join(f"{member}: {cause}" for member, cause in event["causes"].items())
            return f"weight version {event['version']} is not everywhere, who lacks it draws later: {causes}"
        case "replicas_caught_up":
            return f"{', '.join(event['members'])}: has the newest weights again, version {event['version']}"
        case "released":
            return f"{event['site']}: its rollouts are given back; the run goes on without them"
        case "replica_joined":
            return f"{event['member']} is there, and draws as soon as it has the newest weights"
    return None


def _line_of_the_run(event: Mapping[str, Any]) -> str | None:
    match event["kind"]:
        case "checkpoint_copied":
            return f"checkpoint of {event['task']} after step {event['step']} is at {event['site']}, too"
        case "checkpoint_not_copied":
            return f"checkpoint of {event['task']} after step {event['step']} has no copy: {event['cause']}"
        case "refused":
            return f"refused: {refused_line(event['offences'])}; the logs of these sites' gateways say what"
        case "link_out":
            return f"{event['link']}: the link is out; what does not need it goes on"
        case "link_back":
            return f"{event['link']}: the link is back"
        case "ending":
            return f"{event['site']}: Slurm ends its job in some minutes; the run keeps step {event['step']} and ends"
        case "go":
            count = len(event["members"])
            absent = f", without {', '.join(absent)} as yet" if (absent := event.get("absent")) else ""
            return f"GO: {count} member{'s are' if count > 1 else ' is'} ready, the run begins{absent}"
        case "prompts_left_out":
            return (
                f"{event['left_out']} of {event['prompts']} prompts are longer than {event['limit']} tokens: left out"
            )
        case "resumed" if event["version"] == 0:
            return "no checkpoint to go on from: the run begins again"
        case "resumed":
            return f"goes on after step {event['step']}, with version {event['version']} of the weights"
        case "warm_start":
            return f"warm start: {event['steps']} supervised steps, sampled reward {event['reward']:.2f}"
    return None


def refused_line(offences: Mapping[str, Mapping[str, int]]) -> str:
    """Return `8 messages of beta at alpha`."""
    parts = [
        f"{count} message{'s' * (count > 1)} of {peer} at {site}"
        for site, by in offences.items()
        for peer, count in by.items()
    ]
    return ", ".join(parts)


def job_standing(job: Mapping[str, Any]) -> str:
    """Return `RUNNING on alpha-1`, or `PENDING (Resources), starts 14:30 or later`, of an event or record of a job.

    Of an array whose elements differ, `2 RUNNING, 1 FAILED on alpha-1`.
    """
    if job["elements"]:
        states = ", ".join(f"{count} {state}" for state, count in job["elements"].items())
        return f"{states} on {job['nodes']}" if job["nodes"] else states
    if job["state"] != "PENDING":
        return f"{job['state']} on {job['nodes']}" if job["nodes"] else f"{job['state']}"
    reason = f" ({job['reason']})" if job["reason"] not in ("None", "") else ""
    return f"PENDING{reason}" + (f", starts about {moment(job['start'])}" if job["start"] else "")


def moment(seconds: float) -> str:
    """Return a time as the reader's clock shows it, with the day unless it is today."""
    when, today = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if when[:3] == today[:3] else "%Y-%m-%d %H:%M", when)


def progress_line(progress: Progress, solver: str, seconds: float, budget: float) -> str:
    """Return `planning with sha-ea, 3 of 10 s: best 41.2 s per iteration, 98,304 plans/s, 12 groupings alive`."""
    best = f"best {progress.seconds:.1f} s per iteration" if progress.seconds < float("inf") else "no plan yet"
    rate = f"{progress.evaluations / max(seconds, 1e-9):,.0f} plans/s"
    alive = f"{progress.arms} grouping{'s' if progress.arms > 1 else ''} alive"
    return f"planning with {solver}, {seconds:.0f} of {budget:g} s: {best}, {rate}, {alive}"


def charges_line(plan: Plan, topology: Topology, steps: int) -> str:
    """Return what the plan's jobs hold, and what an iteration and all steps come to in time, GPU-hours and price."""
    held, price = held_by_site(plan, topology), price_per_hour(plan, topology)
    hours = plan.predicted.iteration_seconds / 3600

    def spent(times: int) -> str:
        cost = "" if price is None else f" at a price of {figure(price * hours * times)}"
        return f"{figure(sum(held.values()) * hours * times)} GPU-hours{cost}"

    text = f"objective {plan.solver.objective}: the jobs hold {sum(held.values())} devices"
    text += "" if price is None else f" at a price of {figure(price)} per hour"
    text += f"; an iteration takes {spent(1)}; {steps} steps take {figure(hours * steps)} h, {spent(steps)}"
    queue = max(topology.site_by_name[site].queue_hours for site in held)
    return text + (f", after {figure(queue)} h in the queue" if queue else "")


def telling_line(text: str) -> str:
    """Return the line of a log that tells why the process ended: the last that names an error, else the last.

    What a logger says of everyday matters or warns of is neither. MPICH names the cause last, below the error.
    """
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    loud = [line for line in lines if not _QUIET.search(line[:_LEVEL_LETTERS])]
    errors = [line for line in loud if names_error(line)]
    chosen = (errors or loud or [""])[-1]
    if chosen.endswith(_STACK_FOLLOWS):
        deeper = takewhile(_FRAME.match, lines[len(lines) - lines[::-1].index(chosen) :])
        chosen = "; ".join([chosen.removesuffix(_STACK_FOLLOWS), *list(deeper)[-1:]])
    return chosen.removeprefix("error: ")


def names_error(line: str) -> bool:
    """Return whether a line of a log names an error."""
    return _NAMES_ERROR.search(line + " ") is not None


def log_tail(path: Path) -> str:
    """Return the end of a log file, 64 KiB; nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def from_here(path: Path) -> str:
    """Return a path as the reader of this working directory writes it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as aligned text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
