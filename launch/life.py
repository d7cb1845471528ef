"""One life of a run, the same for every executor: agreed, started, followed, ended or left to go on, reported."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from hetrl.errors import GangTimeoutError, HetrlError, UsageError
from hetrl.files import EventLog
from hetrl.plan.plan import Plan
from launch.collect import Collector
from launch.executor import Executor, MakeExecutor, Prepared
from launch.follow import CANCELLED, Outcome, Show, follow, note_exits
from launch.interrupts import Interrupts
from launch.reports import draw_run_page, report_is_due
from launch.run_directory import LAUNCHER, Run
from launch.screen import Screen, say
from launch.show import columns, from_here
from launch.state import State

DETACHED = "detached"
Keep = Callable[[Outcome], bool]  # whether the jobs of a run that ended so shall keep their nodes for another one


def nothing_kept(outcome: Outcome) -> bool:
    """Return that nothing of a run shall go on once it has ended."""
    return False


@dataclass(frozen=True)
class Manner:
    """How a run is followed: with `yes` to whatever is asked; not at all once it is submitted (`detach`).

    `keep` says of how it ended whether its jobs keep their nodes.
    """

    yes: bool = False
    detach: bool = False
    keep: Keep = nothing_kept


PLAIN = Manner()


def begin(prepared: Prepared, plan: Plan, console: Console, manner: Manner) -> int:
    """Start a run once it is agreed that it shall be, and follow it; returns the exit code."""
    events = EventLog(prepared.run.events, LAUNCHER)
    try:
        agreed = prepared.agree(console, manner.yes)
    except HetrlError as error:
        note_end(events, Outcome("failed", error.exit_code, str(error)))
        raise
    except KeyboardInterrupt:
        note_end(events, Outcome("cancelled", CANCELLED, "interrupted before anything was submitted"))
        raise
    if not agreed:
        note_end(events, Outcome("cancelled", 0, "not submitted"))
        return 0
    return bring_up(prepared.run, plan, prepared.executor, console, manner)


def bring_up(run: Run, plan: Plan, executor_of: MakeExecutor, console: Console, manner: Manner) -> int:
    """Start what is not started yet, follow the run to its end, and report; returns the exit code."""
    outcome, remains, elsewhere = live(run, plan, executor_of, console, manner)
    if elsewhere and outcome.phase != DETACHED:
        say(console, elsewhere)
    return ended(run, outcome, console, remains, kept=manner.keep(outcome))


def ended(run: Run, outcome: Outcome, console: Console, remains: Sequence[str], *, kept: bool = False) -> int:
    """Say how a run ended, or how to come back to one that goes on; returns the exit code (`report_end`)."""
    if outcome.phase == DETACHED:
        print(_way_back(run, outcome), file=sys.stderr)
        return outcome.exit_code
    return report_end(run, outcome, console, remains, kept=kept)


def live(
    run: Run, plan: Plan, executor_of: MakeExecutor, console: Console, manner: Manner = PLAIN
) -> tuple[Outcome, Sequence[str], str]:
    """Start what is not started yet, then follow the run to its end.

    Returns how it ended, a line for each part of it that could not be ended, and what of it is not here. What the
    executor started ends with this process, on every way out, or goes on without it (`Executor.outlives`).
    """
    collector, events = Collector(run, plan.lead_site), EventLog(run.events, LAUNCHER)
    collector.collect()
    executor = executor_of(events, lambda: collector.state)
    remains: Sequence[str] = ()
    with ExitStack() as stack:
        stack.enter_context(only_launcher(run))
        screen = stack.enter_context(Screen(console, collector.state.steps))
        interrupts = stack.enter_context(Interrupts(manner.yes or executor.outlives, screen.hold))
        stack.callback(executor.leave)

        def show(event: Mapping[str, Any], state: State) -> None:
            screen.show(event, state)
            if report_is_due(event):
                draw_run_page(run)

        outcome = _start(run, executor, interrupts)
        if executor.outlives:
            for event in collector.collect():
                show(event, collector.state)
            if outcome is None and manner.detach and not collector.state.ended:  # it may have been cancelled meanwhile
                outcome = Outcome(DETACHED, 0)
        outcome = outcome or _follow(run, executor, collector, events, interrupts, show)
        if outcome.phase != DETACHED:
            remains = _end(executor, events, outcome, kept=manner.keep(outcome))
        with contextlib.suppress(OSError):  # nor must it hide how the run ended
            collector.collect()
    if outcome.phase != DETACHED:
        draw_run_page(run)
    return outcome, remains, executor.elsewhere


def _start(run: Run, executor: Executor, interrupts: Interrupts) -> Outcome | None:
    """Start what is not started yet; return how the run ended where that failed."""
    try:
        executor.start(interrupts.stop)
    except Exception as error:
        outcome = failure(run, error)
        if executor.adopts:
            number = interrupts.stop()
            return replace(outcome, phase=DETACHED, exit_code=128 + number if number else outcome.exit_code)
        if executor.outlives and (number := interrupts.stop()):
            return replace(outcome, phase="cancelled", exit_code=128 + number)
        return outcome
    return None


def _follow(
    run: Run, executor: Executor, collector: Collector, events: EventLog, interrupts: Interrupts, show: Show
) -> Outcome:
    """Watch until the run ends or this process shall; return how."""
    try:
        outcome = follow(run, executor, collector, events, interrupts, show)
    except GangTimeoutError as error:
        outcome = failure(run, error)
    except Exception as error:  # a defect of this process, or of its disk: no reason to end what runs elsewhere
        outcome = failure(run, error)
        return replace(outcome, phase=DETACHED, exit_code=1) if executor.outlives else outcome
    if executor.outlives and (number := interrupts.stop()):
        return Outcome(DETACHED, 128 + number)
    return outcome


def _end(executor: Executor, events: EventLog, outcome: Outcome, *, kept: bool) -> Sequence[str]:
    """Say how the run ended and end what is left of it; return a line for each part that could not be ended.

    What is `kept` is left to those who take the run up.
    """
    with contextlib.suppress(OSError):  # a disk that is full must not keep the processes from being stopped
        note_end(events, outcome)
    remains = [] if kept else executor.stop()
    with contextlib.suppress(OSError):
        note_exits(events, executor.poll())
    return remains


@contextmanager
def only_launcher(run: Run) -> Iterator[None]:
    """Keep other launchers off the run; raises UsageError where one is at it."""
    descriptor = os.open(run.path / ".launcher", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:  # a lock of the kernel: it is given back however this process ends
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{run.id}: another hetrl follows it; see `hetrl status {run.id}`, or end that process first"
            ) from None
        yield
    finally:
        os.close(descriptor)


def note_end(events: EventLog, outcome: Outcome) -> None:
    """Write the event that ends the run."""
    fields = {} if outcome.phase == "finished" else {"cause": outcome.cause, "exit_code": outcome.exit_code}
    events.append(outcome.phase, **fields)


def failure(run: Run, error: Exception) -> Outcome:
    """Return how an error of the launcher ends the run; the traceback of a defect goes to logs/launcher.log."""
    if isinstance(error, HetrlError):
        return Outcome("failed", error.exit_code, str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return Outcome("failed", 1, f"{from_here(run.path)}: {error.strerror}; make room, then submit again")
    with contextlib.suppress(OSError), run.launcher_log.open("a") as log:
        traceback.print_exception(error, file=log)
    where = from_here(run.launcher_log)
    return Outcome("failed", 1, f"the launcher failed: {type(error).__name__}: {error}; see {where}")


def _way_back(run: Run, outcome: Outcome) -> str:
    why = f"{outcome.cause}\n" if outcome.cause else ""
    return (
        f"{why}run {run.id} goes on without this process\n"
        f"  hetrl status {run.id}      where it stands\n"
        f"  hetrl logs -f {run.id}     what it prints\n"
        f"  hetrl resume {run.id}      follow it again\n"
        f"  hetrl cancel {run.id}      end it"
    )


def report_end(run: Run, outcome: Outcome, console: Console, remains: Sequence[str] = (), *, kept: bool = False) -> int:
    """Print what the run achieved or why it ended, and where everything lies; returns the exit code.

    `remains` are the parts of the run that could not be ended; its jobs are `kept` where they hold their nodes.
    """
    if outcome.phase == "finished" and run.summary.exists():
        from hetrl.report.tables import summary_table

        console.print(summary_table(json.loads(run.summary.read_text())))
    if outcome.phase != "finished":
        print(f"{'error: ' if outcome.phase == 'failed' else ''}{outcome.cause}", file=sys.stderr)
        left = "; its jobs hold their nodes" if kept else "" if remains else "; nothing of it goes on"
        print(f"run {run.id} is {outcome.phase}{left}", file=sys.stderr)
    for line in remains:
        print(f"error: not ended (`hetrl cancel {run.id}` tries again): {line}", file=sys.stderr)
    say(console, f"in {from_here(run.path)}:")
    say(console, columns([(f"  {name}", what) for name, what in _WHERE.items() if _has_content(run.path / name)]))
    return outcome.exit_code


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


_WHERE = {
    "report.html": "the run as a page",
    "plan.html": "the plan as a page",
    "summary.json": "what it achieved",
    "metrics.jsonl": "a row per step",
    "samples.jsonl": "some samples of every step",
    "events.jsonl": "what happened, and when",
    "logs": "what each process printed",
    "checkpoints": "the model's states",
}
