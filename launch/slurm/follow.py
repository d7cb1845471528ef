"""Runs at Slurm sites: submit, follow, come back. The jobs go on without this process.

submit     prepare, preflight, preview, ask -> submit everywhere or nowhere -> follow
resume     submit what is missing (or take what a launcher that died left undone) -> follow
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from hetrl.errors import GangTimeoutError, HetrlError, PartialError, UsageError
from hetrl.events import EventLog
from hetrl.plan.document import read_plan
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from launch.collect import Collector, log_planned
from launch.ending import failure, note_end, report_end
from launch.follow import CANCELLED, Outcome, Show, follow
from launch.interrupts import Interrupts
from launch.reports import report_is_due, write_plan_page, write_run_page
from launch.run_directory import LAUNCHER, Run, find_run
from launch.screen import Screen, say
from launch.show import from_here
from launch.slurm.preflight import Answer, preflight, preview_table
from launch.slurm.run import SlurmRun, read_slurm_run
from launch.slurm.stage import Prepared, describe, dry_run_text, prepare_slurm
from launch.slurm.submit import submit_everywhere
from launch.slurm.verbs import refresh
from launch.slurm.watch import SlurmExecutor, cancel_everywhere
from launch.state import State

DETACHED = "detached"


def submit_slurm(problem: Problem, plan: Plan, config: Path, console: Console, *, yes: bool, detach: bool) -> int:
    """Start a run at its Slurm sites and follow it, unless `detach`; returns the exit code."""
    prepared = prepare_slurm(problem, plan, config)
    run, slurm = prepared.run, describe(problem, prepared, plan.site_order)
    write_plan_page(run, plan, problem)
    log_planned(run, plan, problem.experiment)
    say(console, f"run {run.id} in {from_here(run.path)}")
    events = EventLog(run.events, LAUNCHER)
    try:
        with console.status("asking every site"):
            answers = preflight(problem, prepared.scripts)
        _show(console, problem, plan, prepared, answers)
        agreed = yes or _agreed()
    except HetrlError as error:
        note_end(events, Outcome("failed", error.exit_code, str(error)))
        raise
    except KeyboardInterrupt:
        note_end(events, Outcome("cancelled", CANCELLED, "interrupted before anything was submitted"))
        raise
    if not agreed:
        note_end(events, Outcome("cancelled", 0, "not submitted"))
        return 0
    return bring_up(run, slurm, plan, console, detach=detach)


def _show(console: Console, problem: Problem, plan: Plan, prepared: Prepared, answers: Mapping[str, Answer]) -> None:
    """Print what the sites had to remark, and what would be submitted."""
    for site, answer in answers.items():
        for finding in (each for each in answer.findings if each.verdict == "warning"):
            print(f"note: {site}: {finding.what}: {finding.found}; {finding.remedy}", file=sys.stderr)
    console.print(preview_table(problem, plan, prepared.scripts, answers))


def dry_run(problem: Problem, plan: Plan, config: Path, console: Console) -> int:
    """Write what would be submitted and print the commands that would do so; no site is asked anything."""
    prepared = prepare_slurm(problem, plan, config, dry_run=True)
    write_plan_page(prepared.run, plan, problem)
    print(dry_run_text(prepared, {site.name: site for site in problem.scenario.sites}))
    say(console, f"nothing was submitted; what would be lies in {from_here(prepared.run.path / 'scripts')}")
    return 0


def _agreed() -> bool:
    """Ask on a terminal; without one the answer is yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print("Submit? [Y/n] ", end="", file=sys.stderr, flush=True)
    return not sys.stdin.readline().strip().lower().startswith("n")


def resume_command(arguments: argparse.Namespace) -> int:
    """Take a run up where the last launcher left it."""
    run = find_run(arguments.run)
    slurm = read_slurm_run(run)
    if slurm is None:
        raise UsageError(f"{run.id}: nothing of it is at a Slurm site; submit it again")
    collector = Collector(run, slurm.lead.name)
    collector.collect()
    if collector.state.ended:
        return _finish_off(run, slurm, collector)
    return bring_up(run, slurm, read_plan(run.path / "plan.json"), Console(), detach=arguments.detach)


def _finish_off(run: Run, slurm: SlurmRun, collector: Collector) -> int:
    """Cancel what may be left of a run that has ended."""
    count, remains = cancel_everywhere(slurm)
    print(f"{run.id} is {collector.state.phase} already; {count} job{'' if count == 1 else 's'} left, cancelled")
    if remains:
        raise PartialError("\n".join(remains))
    return 0


def bring_up(run: Run, slurm: SlurmRun, plan: Plan, console: Console, *, detach: bool) -> int:
    """Submit what is not submitted yet, then follow the run to its end; returns the exit code.

    A run that could not be submitted everywhere is nowhere. One that runs goes on, whatever becomes of this process.
    """
    collector, events = Collector(run, plan.lead_site), EventLog(run.events, LAUNCHER)
    collector.collect()
    remains: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_only_launcher(run))
        screen = stack.enter_context(Screen(console, collector.state.steps))
        interrupts = stack.enter_context(Interrupts(always_yes=True))

        def show(event: Mapping[str, Any], state: State) -> None:
            screen.show(event, state)
            if report_is_due(event):
                write_run_page(run, plan)

        outcome = _submit(run, slurm, events, collector, interrupts)
        for event in collector.collect():
            show(event, collector.state)
        if outcome is None and detach and not collector.state.ended:  # it may have been cancelled meanwhile
            outcome = Outcome(DETACHED, 0)
        elif outcome is None:
            outcome, remains = _follow(run, slurm, events, collector, interrupts, show)
        collector.collect()
    if outcome.phase == DETACHED:
        print(_way_back(run, outcome), file=sys.stderr)
        return outcome.exit_code
    write_run_page(run, plan)
    say(console, f"checkpoints of the run, if any, are at {slurm.lead.name}: {slurm.lead.directory}/checkpoints")
    return report_end(run, outcome, console, remains)


def _submit(
    run: Run, slurm: SlurmRun, events: EventLog, collector: Collector, interrupts: Interrupts
) -> Outcome | None:
    """Submit what is not submitted yet; return how the run ended where that failed and was undone."""
    try:
        submit_everywhere(run, slurm, events, collector.state, interrupts.stop)
    except Exception as error:
        outcome = failure(run, error)
        if number := interrupts.stop():
            outcome = Outcome("cancelled", 128 + number, outcome.cause)
        note_end(events, outcome)
        return outcome
    return None


def _follow(
    run: Run, slurm: SlurmRun, events: EventLog, collector: Collector, interrupts: Interrupts, show: Show
) -> tuple[Outcome, list[str]]:
    """Watch until the run ends or this process shall; in the first case alone cancel what is left of its jobs.

    Returns how it ended, and a line for each site where that could not be done.
    """
    executor = SlurmExecutor(run, slurm, events, lambda: collector.state)
    try:
        outcome = follow(run, executor, collector, events, interrupts, show)
    except GangTimeoutError as error:
        outcome = failure(run, error)
    except Exception as error:  # a defect of this process, or of its disk: no reason to end what runs elsewhere
        return Outcome(DETACHED, 1, failure(run, error).cause), []
    finally:
        executor.leave()
    if number := interrupts.stop():
        return Outcome(DETACHED, 128 + number), []
    with contextlib.suppress(OSError):
        note_end(events, outcome)
    remains = executor.stop()
    refresh(run, slurm, LAUNCHER, logs=True)
    return outcome, remains


def _way_back(run: Run, outcome: Outcome) -> str:
    why = f"{outcome.cause}\n" if outcome.cause else ""
    return (
        f"{why}run {run.id} goes on without this process\n"
        f"  hetrl status {run.id}      where it stands\n"
        f"  hetrl logs -f {run.id}     what it prints\n"
        f"  hetrl resume {run.id}      follow it again\n"
        f"  hetrl cancel {run.id}      end it"
    )


@contextmanager
def _only_launcher(run: Run) -> Iterator[None]:
    """Keep other launchers off the run; raises UsageError where one is at it."""
    descriptor = os.open(run.path / ".launcher", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{run.id}: another hetrl follows it; see `hetrl status {run.id}`, or end that process first"
            ) from None
        yield
    finally:
        os.close(descriptor)
