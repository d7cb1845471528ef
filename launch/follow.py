"""Follow a run until it ends: note exits, collect what the controller wrote, show it, and judge.

repeat:
    note the processes that exited          (before collecting: a writer that is gone has written all it will)
    start a gateway again that was killed   (it holds nothing that its members do not hold too)
    collect events, show a line for each
    the user or another terminal ended it   -> cancelled
    the controller says finished            -> finished, once the members left or had time to
    the controller says failed              -> failed, likewise
    the controller is gone without a word   -> failed
    a member exited with an error           -> failed, unless the controller says why within a moment
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetrl.events import EventLog
from launch.collect import Collector
from launch.interrupts import Interrupts
from launch.local import Exit, LocalExecutor
from launch.render import CONTROLLER, GATEWAY, spoken
from launch.run_directory import Run
from launch.show import from_here, log_tail, telling_line
from launch.state import State

POLL_SECONDS = 0.1
WORD_SECONDS = 5.0  # how long a failed member waits for the controller's own explanation
LEAVE_SECONDS = 15.0  # how long members have to leave by themselves after the end
CANCELLED = 128 + signal.SIGINT
GATEWAY_RESTARTS = 100  # of one gateway: one that keeps crashing ends the run

Show = Callable[[Mapping[str, Any], State], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the phase, the exit code of the command line and, unless it finished, the cause."""

    phase: str
    exit_code: int
    cause: str = ""


@dataclass
class Watched:
    """What the follower has seen so far; times are those of the monotonic clock."""

    exits: list[Exit]
    failed_at: float | None = None
    ended_at: float | None = None

    def add(self, exits: Sequence[Exit], state: State) -> None:
        """Note exits and when the first error and the end came."""
        self.exits += exits
        now = time.monotonic()
        if self.failed_at is None and self.bad_exit is not None:
            self.failed_at = now
        if self.ended_at is None and state.ended:
            self.ended_at = now

    @property
    def bad_exit(self) -> Exit | None:
        """Return the first exit with an error, the controller's only where it is the only one."""
        bad = sorted((gone for gone in self.exits if gone.code), key=lambda gone: gone.process == CONTROLLER)
        return bad[0] if bad else None

    @property
    def controller_exit(self) -> Exit | None:
        """Return the controller's exit."""
        return next((gone for gone in self.exits if gone.process == CONTROLLER), None)


def follow(
    run: Run, executor: LocalExecutor, collector: Collector, events: EventLog, interrupts: Interrupts, show: Show
) -> Outcome:
    """Watch until the run has ended or shall end, and return how; stopping its processes is the caller's."""
    watched, restarts = Watched([]), Counter[str]()
    while True:
        exits = executor.poll()
        note_exits(events, exits)
        if not collector.state.ended:
            exits = [gone for gone in exits if not revived(gone, executor, events, restarts)]
        for event in collector.collect():
            show(event, collector.state)
        watched.add(exits, collector.state)
        if number := interrupts.stop():
            return Outcome("cancelled", 128 + number, f"stopped by {signal.Signals(number).name}")
        if outcome := judge(run, watched, collector.state, executor.names(), time.monotonic()):
            return outcome
        time.sleep(POLL_SECONDS)


def revived(gone: Exit, executor: LocalExecutor, events: EventLog, restarts: Counter[str]) -> bool:
    """Start a gateway again that a signal ended; return whether this was one. One that exits by itself says why."""
    if gone.process != GATEWAY or gone.code >= 0 or restarts[gone.site] >= GATEWAY_RESTARTS:
        return False
    restarts[gone.site] += 1
    process = executor.restart(gone.site, gone.process)
    events.append("restarted", site=gone.site, process=process, signal=_signal_name(-gone.code))
    return True


def note_exits(events: EventLog, exits: Iterable[Exit]) -> None:
    """Write an event for each process that ended."""
    for gone in exits:
        events.append("process_exited", site=gone.site, process=gone.process, code=gone.code)


def judge(run: Run, watched: Watched, state: State, running: Sequence[str], now: float) -> Outcome | None:
    """Return how the run ended, None while it goes on; `running` are the names of the living processes."""
    if state.phase == "cancelled":
        return Outcome("cancelled", CANCELLED, state.cause or "cancelled")
    if state.ended and watched.ended_at is not None:
        if set(running) <= {GATEWAY} or now - watched.ended_at > _patience(state):
            return _ended(run, watched, state)
        return None
    if (controller := watched.controller_exit) is not None:
        bad = watched.bad_exit
        return Outcome("failed", 1, explain(run, bad if bad is not None else controller))
    if watched.failed_at is not None and now - watched.failed_at > WORD_SECONDS and watched.bad_exit is not None:
        return Outcome("failed", 1, explain(run, watched.bad_exit))
    return None


def _patience(state: State) -> float:
    return LEAVE_SECONDS if state.phase == "finished" else WORD_SECONDS


def _ended(run: Run, watched: Watched, state: State) -> Outcome:
    if state.phase == "finished":
        return Outcome("finished", 0)
    cause = state.cause or "the controller gave no cause"
    bad = watched.bad_exit
    if bad is not None and bad.process != CONTROLLER:
        cause += f"\n{explain(run, bad)}"
    else:
        cause += f"\nsee {from_here(run.path / 'logs')}"
    return Outcome("failed", state.exit_code or 1, cause)


def explain(run: Run, gone: Exit) -> str:
    """Return `alpha: actor_training rank 1 exited with code 1: <telling line>; see <log>`."""
    log = run.log(gone.site, gone.process)
    how = f"exited with code {gone.code}"
    if gone.code < 0:
        how = f"was ended by {_signal_name(-gone.code)}"
        how += " (is this machine out of memory?)" if -gone.code == signal.SIGKILL else ""
    if gone.code == 0:
        how = "ended without a result"
    told = telling_line(log_tail(log))
    return f"{gone.site}: {spoken(gone.process)} {how}{f': {told}' if told else ''}; see {from_here(log)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
