"""`hetrl submit`: plan, make the run directory, start every site, follow the run to its end."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from hetrl.config import Experiment, Problem, read_problem
from hetrl.errors import HetrlError, UsageError
from hetrl.events import EventLog
from hetrl.plan import Plan
from hetrl.runtime.keys import make_run_keys
from hetrl.runtime.support import check_runnable
from launch.collect import Collector
from launch.follow import Outcome, follow, note_exits
from launch.interrupts import Interrupts
from launch.local import LocalExecutor
from launch.planning import given_plan, print_plan, print_sites, solve_problem
from launch.ports import LOOPBACK, free_ports, gateway_endpoints
from launch.render import Job, Store, check_startable, render, tasks_with_store
from launch.reports import write_plan_page, write_run_page
from launch.run_directory import LAUNCHER, Run, create_run, stage, write_scripts
from launch.screen import Screen, say
from launch.show import columns, from_here
from launch.state import State

REPORT_STEPS = 20


def submit_command(arguments: argparse.Namespace) -> int:
    """Start a run and follow it; returns the exit code of its end."""
    console = Console()
    problem = read_problem(arguments.config)
    choose_executor(problem)
    check_runnable(problem.experiment)
    print_sites(console, problem)
    plan = given_plan(arguments.plan, problem) if arguments.plan else solve_problem(problem)
    print_plan(console, plan, problem)
    check_startable(plan)
    run, jobs = prepare(problem, plan, arguments.config)
    say(console, f"run {run.id} in {from_here(run.path)}")
    if arguments.dry_run:
        say(console, f"nothing was started; what would be lies in {from_here(run.path / 'scripts')}")
        return 0
    outcome = launch(run, plan, jobs, console, problem.experiment.steps, always_yes=arguments.yes)
    return report_end(run, outcome, console)


def choose_executor(problem: Problem) -> str:
    """Return the executor: local where there is no Slurm or no site of it; raises UsageError for one not there yet."""
    asked = problem.experiment.launch.executor
    remote = [site.name for site in problem.scenario.sites if site.ssh != "local"]
    slurm = asked == "slurm" or (asked == "auto" and shutil.which("sbatch") is not None and bool(remote))
    if slurm:
        raise UsageError("launch.executor: the slurm executor is not there yet; set launch.executor: local")
    return "local"


def prepare(problem: Problem, plan: Plan, config: Path) -> tuple[Run, tuple[Job, ...]]:
    """Make the run directory with all that its sites read; nothing is started.

    Raises UsageError for a port that is taken, HetrlError where the directory cannot be written.
    """
    used = [site for site in problem.scenario.sites if site.name in plan.site_order]
    gateways = gateway_endpoints(used)
    keys = make_run_keys(plan.site_order)
    gpus = {device.id: device.gpu for device in problem.topology.devices}
    run = create_run(problem.experiment.name, config.read_text(), plan)
    jobs = render(plan, gpus, run.id, pick_stores(plan))
    stage(run, problem.experiment, plan, gpus, gateways, keys)
    write_scripts(run, jobs)
    write_plan_page(run, plan, problem)
    log_planned(run, plan, problem.experiment)
    return run, jobs


def pick_stores(plan: Plan) -> dict[str, Store]:
    """Return a free port of this machine for the store of every torch world."""
    names = tasks_with_store(plan)
    return {name: Store(LOOPBACK, port) for name, port in zip(names, free_ports(len(names)), strict=True)}


def log_planned(run: Run, plan: Plan, experiment: Experiment) -> None:
    """Write the run's first event and state: what was planned, and which process launches it."""
    launcher = {"pid": os.getpid(), "created": psutil.Process().create_time()}
    sites = list(plan.site_order)
    EventLog(run.events, LAUNCHER).append(
        "planned", run=run.id, name=experiment.name, sites=sites, steps=experiment.steps, launcher=launcher
    )
    Collector(run, plan.lead_site).collect()


def launch(
    run: Run, plan: Plan, jobs: Sequence[Job], console: Console, steps: int, always_yes: bool = False
) -> Outcome:
    """Start all jobs and follow the run; on every way out no process of it is left, and the events say how it ended."""
    executor, collector = LocalExecutor(run), Collector(run, plan.lead_site)
    events = EventLog(run.events, LAUNCHER)
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(console, steps))
        interrupts = stack.enter_context(Interrupts(always_yes, screen.hold))
        stack.callback(executor.stop)

        def show(event: Mapping[str, Any], state: State) -> None:
            screen.show(event, state)
            if event["kind"] == "step" and event["step"] % REPORT_STEPS == 1:
                write_run_page(run, plan)

        try:
            for job in jobs:
                processes = executor.start(job)
                events.append("submitted", site=job.site, job=job.name, job_kind=job.kind, processes=processes)
            outcome = follow(run, executor, collector, events, interrupts, show)
        except Exception as error:
            outcome = failure(run, error)
        with contextlib.suppress(OSError):  # a disk that is full must not keep the processes from being stopped
            _note_end(events, outcome)
        executor.stop()
        with contextlib.suppress(OSError):
            note_exits(events, executor.poll())
            collector.collect()
    write_run_page(run, plan)
    return outcome


def _note_end(events: EventLog, outcome: Outcome) -> None:
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


def report_end(run: Run, outcome: Outcome, console: Console) -> int:
    """Print what the run achieved or why it ended, and where everything lies; returns the exit code."""
    if outcome.phase == "finished" and run.summary.exists():
        from hetrl.report.tables import summary_table

        console.print(summary_table(json.loads(run.summary.read_text())))
    if outcome.phase != "finished":
        print(f"{'error: ' if outcome.phase == 'failed' else ''}{outcome.cause}", file=sys.stderr)
        print(f"run {run.id} is {outcome.phase}; no process of it is left", file=sys.stderr)
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
    "events.jsonl": "what happened, and when",
    "logs": "what each process printed",
    "checkpoints": "the model's states",
}
