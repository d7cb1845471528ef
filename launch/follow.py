"""Follow a run until it ends: note exits, collect what the controller wrote, show it, and judge.

repeat:
    note what exited                        (before collecting: a writer that is gone has written all it will)
    collect events, show a line for each
    the user or another terminal ended it   -> cancelled
    the controller says finished            -> finished, once the members left or had time to
    the controller says failed              -> failed, likewise
    the controller is gone without a word   -> failed
    its site does not answer, and the others
    have ended since, for they heard of it
    as little                               -> failed
    a member exited with an error           -> failed, unless the controller says why within a moment, or goes on
                                               without it
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetrl.errors import SiteUnreachableError
from hetrl.files import EventLog
from hetrl.runtime.wire import CONTROLLER, GATEWAY
from launch.collect import Collector
from launch.executor import Executor, Exit, Started
from launch.interrupts import Interrupts, signal_name
from launch.run_directory import Run
from launch.show import from_here, log_tail, names_error, telling_line
from launch.state import State

POLL_SECONDS = 0.1
WORD_SECONDS = 5.0  # how long a failed member waits for the controller's own explanation
LEAVE_SECONDS = 15.0  # how long members have to leave by themselves after the end
SILENCE_SECONDS = 60.0  # how long the controller's site has to answer again once all others have ended
CANCELLED = 128 + signal.SIGINT

_FIRST = re.compile(r"the job ends with exit code (\d+), for (\S+) failed first")  # slurm_templates/gang.sbatch.j2

Show = Callable[[Mapping[str, Any], State], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the phase, the exit code of the command line and, unless it finished, the cause."""

    phase: str
    exit_code: int
    cause: str = ""


@dataclass
class Watched:
    """What the follower has seen so far; times are those of the monotonic clock, infinite before they come.

    `goes_on` says that the run goes on without what is spare, `silent` since when a site has not answered.
    """

    exits: list[tuple[Exit, float]] = field(default_factory=list)
    silent: Mapping[str, float] = field(default_factory=dict)
    ended_at: float = math.inf
    goes_on: bool = False

    def add(self, exits: Sequence[Exit], state: State, begins_without: bool = False) -> None:
        """Note exits and when they and the end came."""
        now = time.monotonic()
        self.exits += [(gone, now) for gone in exits]
        self.silent = {site: self.silent.get(site, now) for site in state.silent}
        self.goes_on = state.phase == "running" or (state.phase == "starting" and begins_without)
        if state.ended:
            self.ended_at = min(self.ended_at, now)

    @property
    def bad_exit(self) -> Exit | None:
        """Return the first exit with an error, the controller's only where it is the only one."""
        return next((gone for gone, _ in sorted(self._bad, key=lambda each: _leads(each[0]))), None)

    @property
    def failed_at(self) -> float:
        """Return when the first exit with an error came."""
        return min((at for _, at in self._bad), default=math.inf)

    @property
    def leading_exit(self) -> Exit | None:
        """Return the exit of the controller, or of the job that it is in."""
        return next((gone for gone, _ in self.exits if _leads(gone)), None)

    @property
    def leaderless_at(self) -> float:
        """Return when that came."""
        return min((at for gone, at in self.exits if _leads(gone)), default=math.inf)

    def deserted(self, alive: Sequence[Started], now: float) -> str | None:
        """Return the controller's site where it is silent, and all that lived elsewhere has ended, some of it since."""
        if {one.site for one in alive} - self.silent.keys():
            return None
        site = next((one.site for one in alive if one.role == CONTROLLER), None)
        if site is None or now - self.silent[site] < SILENCE_SECONDS:
            return None
        return site if any(at >= self.silent[site] for _, at in self.exits) else None

    @property
    def _bad(self) -> list[tuple[Exit, float]]:
        return [(gone, at) for gone, at in self.exits if gone.code and not (gone.what.spare and self.goes_on)]


def _leads(gone: Exit) -> bool:
    """Return whether the run cannot go on without this."""
    return gone.what.role == CONTROLLER


def follow(
    run: Run, executor: Executor, collector: Collector, events: EventLog, interrupts: Interrupts, show: Show
) -> Outcome:
    """Watch until the run has ended or shall end, and return how; stopping its processes is the caller's."""
    watched = Watched()
    while True:
        exits = executor.poll()
        note_exits(events, exits)
        for event in collector.collect():
            show(event, collector.state)
        watched.add(exits, collector.state, executor.begins_without)
        if number := interrupts.stop():
            return Outcome("cancelled", 128 + number, f"stopped by {signal.Signals(number).name}")
        if outcome := judge(run, watched, collector.state, executor, time.monotonic()):
            return outcome
        time.sleep(POLL_SECONDS)


def note_exits(events: EventLog, exits: Iterable[Exit]) -> None:
    """Write an event for each process or job that ended."""
    for gone in exits:
        events.append("process_exited", site=gone.what.site, process=gone.what.name, code=gone.code)


def judge(run: Run, watched: Watched, state: State, executor: Executor, now: float) -> Outcome | None:
    """Return how the run ended, None while it goes on."""
    if state.phase == "cancelled":
        return Outcome("cancelled", CANCELLED, state.cause or "cancelled")
    bad, lag_seconds = watched.bad_exit, executor.lag_seconds
    if state.ended:
        left = {one.role for one in executor.alive()}  # a gateway is ended by us; the job that it is in ends it
        patience_seconds = LEAVE_SECONDS if state.phase == "finished" else WORD_SECONDS
        over = left <= {GATEWAY} or now - watched.ended_at > patience_seconds + lag_seconds
        return _ended(run, watched, state) if over else None
    if (leading := watched.leading_exit) is not None and now - watched.leaderless_at >= lag_seconds:
        return Outcome("failed", 1, explain(run, bad or leading))
    if bad is not None and now - watched.failed_at > WORD_SECONDS + lag_seconds:
        return Outcome("failed", 1, explain(run, bad))
    if state.silent and (site := watched.deserted(executor.alive(), now)):
        cause = f"{site}, which leads, does not answer, and all jobs elsewhere have ended: {state.silent[site]}"
        return Outcome("failed", SiteUnreachableError.exit_code, cause)
    return None


def _ended(run: Run, watched: Watched, state: State) -> Outcome:
    if state.phase == "finished":
        return Outcome("finished", 0)
    cause = state.cause or "the controller gave no cause"
    bad = watched.bad_exit
    if bad is not None and not _leads(bad):
        cause += f"\n{explain(run, bad)}"
    else:
        cause += f"\nsee {from_here(run.path / 'logs')}"
    return Outcome("failed", state.exit_code or 1, cause)


def explain(run: Run, gone: Exit) -> str:
    """Return `alpha: actor_training rank 1 exited with code 1: <telling line>; see <log>`."""
    if gone.how:
        return _explain_job(run, gone)
    site, log = gone.what.site, run.log(gone.what.site, gone.what.name)
    how = f"exited with code {gone.code}"
    if gone.code < 0:
        how = f"was ended by {signal_name(-gone.code)}"
        how += " (is this machine out of memory?)" if -gone.code == signal.SIGKILL else ""
    if gone.code == 0:
        how = "ended without a result"
    told = telling_line(log_tail(log))
    return f"{site}: {gone.what.spoken} {how}{f': {told}' if told else ''}; see {from_here(log)}"


def _first_to_fail(logs: Iterable[Path], job: str) -> tuple[str, int] | None:
    """Return the process of a job that failed before the others, and its exit code, where the job's log says so."""
    found = (_FIRST.search(log_tail(log)) for log in logs if log.name.startswith(f"{job}-"))
    return next(((match[2], int(match[1])) for match in found if match), None)


def _explain_job(run: Run, gone: Exit) -> str:
    """Return how a job ended, with the line of the site's logs that tells why.

    That is one of the process that failed first, where the job's own log names it; else a member's before the job's.
    """
    site, job = gone.what.site, gone.what.name
    logs = sorted((run.path / "logs" / site).glob("*.log"), key=lambda log: log.name.startswith(job))
    said = f"{site}: {job} ({gone.how})"
    if first := _first_to_fail(logs, job):
        name, code = first
        log = run.log(site, name)
        told = telling_line(log_tail(log))
        how = f"exited with code {code}" if code <= 128 else f"was ended by {signal_name(code - 128)}"
        return f"{said}: {name} {how}{f': {told}' if names_error(told) else ''}; see {from_here(log)}"
    for log in logs:
        line = telling_line(log_tail(log))
        if names_error(line):
            return f"{said}: {line}; see {from_here(log)}"
    return f"{said}; see {from_here(run.path / 'logs' / site)}"
