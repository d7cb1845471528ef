"""`hetrl submit`: plan, make the run directory, start every site, follow the run to its end."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from hetrl.events import EventLog
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.runtime.run.support import check_runnable
from hetrl.runtime.wire.keys import make_run_keys
from launch.collect import Collector, log_planned
from launch.ending import failure, note_end, report_end
from launch.executor import choose_executor
from launch.follow import Outcome, follow, note_exits
from launch.interrupts import Interrupts
from launch.links import links_of, relay_secrets
from launch.local import LocalExecutor, prefixed
from launch.ports import LOOPBACK, free_ports, gateway_endpoints
from launch.render import Job, Store, check_startable, render, tasks_with_store
from launch.reports import report_is_due, write_plan_page, write_run_page
from launch.run_directory import LAUNCHER, Run, create_run, stage, write_scripts
from launch.screen import Screen, say
from launch.show import from_here
from launch.state import State
from launch.verbs.planning import given_plan, print_plan, print_sites, problem_at, solve_problem


def submit_command(arguments: argparse.Namespace) -> int:
    """Start a run and follow it; returns the exit code of its end."""
    console = Console()
    problem = problem_at(arguments.config)
    executor = choose_executor(problem.experiment.launch.executor, problem.scenario.sites)
    if not (arguments.dry_run and executor == "slurm"):  # scripts can be looked at without the data and the weights
        check_runnable(problem.experiment)
    print_sites(console, problem)
    plan = given_plan(arguments.plan, problem) if arguments.plan else solve_problem(problem)
    print_plan(console, plan, problem)
    check_startable(plan)
    if executor == "slurm":
        from launch.slurm.follow import dry_run, submit_slurm

        if arguments.dry_run:
            return dry_run(problem, plan, arguments.config, console)
        return submit_slurm(problem, plan, arguments.config, console, yes=arguments.yes, detach=arguments.detach)
    run, jobs = prepare(problem, plan, arguments.config)
    say(console, f"run {run.id} in {from_here(run.path)}")
    if arguments.dry_run:
        say(console, f"nothing was started; what would be lies in {from_here(run.path / 'scripts')}")
        return 0
    outcome = launch(run, plan, jobs, console, problem.experiment.steps, always_yes=arguments.yes)
    return report_end(run, outcome, console)


def prepare(problem: Problem, plan: Plan, config: Path) -> tuple[Run, tuple[Job, ...]]:
    """Make the run directory with all that its sites read; nothing is started.

    Raises UsageError for a port that is taken and for two sites without a way, HetrlError where the directory cannot
    be written.
    """
    used = [site for site in problem.scenario.sites if site.name in plan.site_order]
    gateways = gateway_endpoints(used)
    links = links_of(used, gateways, plan.weight_sync.routes)
    secrets = relay_secrets(site for site in used if links[site.name].relays)
    keys = make_run_keys(plan.site_order)
    gpus = {device.id: device.gpu for device in problem.topology.devices}
    run = create_run(problem.experiment.name, config.read_text(), plan)
    jobs = prefixed(render(plan, gpus, run.id, pick_stores(plan)), {site.name: site.prefix for site in used})
    stage(run, problem.experiment, plan, gpus, gateways, keys, links, secrets)
    write_scripts(run, jobs)
    write_plan_page(run, plan, problem)
    log_planned(run, plan, problem.experiment)
    return run, jobs


def pick_stores(plan: Plan) -> dict[str, Store]:
    """Return a free port of this machine for the store of every torch world."""
    names = tasks_with_store(plan)
    return {name: Store(LOOPBACK, port) for name, port in zip(names, free_ports(len(names)), strict=True)}


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
            if report_is_due(event):
                write_run_page(run, plan)

        try:
            for job in jobs:
                processes = executor.start(job)
                events.append("submitted", site=job.site, job=job.name, job_kind=job.kind, processes=processes)
            outcome = follow(run, executor, collector, events, interrupts, show)
        except Exception as error:
            outcome = failure(run, error)
        with contextlib.suppress(OSError):  # a disk that is full must not keep the processes from being stopped
            note_end(events, outcome)
        executor.stop()
        with contextlib.suppress(OSError):
            note_exits(events, executor.poll())
            collector.collect()
    write_run_page(run, plan)
    return outcome
