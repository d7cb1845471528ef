"""`hetrl submit`: plan, make the run directory, start every site, follow the run to its end."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.runtime.run.support import check_runnable
from launch.collect import log_planned
from launch.executor import SLURM, Prepared, choose_executor
from launch.life import begin
from launch.local import prepare_local
from launch.render import check_startable
from launch.reports import write_plan_page
from launch.screen import say
from launch.show import from_here
from launch.verbs.planning import given_plan, print_plan, print_sites, problem_at, solve_problem


def submit_command(arguments: argparse.Namespace) -> int:
    """Start a run and follow it; returns the exit code of its end."""
    console = Console()
    problem = problem_at(arguments.config)
    executor = choose_executor(problem.experiment.launch.executor, problem.scenario.sites)
    if not (arguments.dry_run and executor == SLURM):  # scripts can be looked at without the data and the weights
        check_runnable(problem.experiment)
    print_sites(console, problem)
    plan = given_plan(arguments.plan, problem) if arguments.plan else solve_problem(problem)
    print_plan(console, plan, problem)
    check_startable(plan)
    if executor == SLURM and arguments.dry_run:
        from launch.slurm.prepare import dry_run

        return dry_run(problem, plan, arguments.config, console)
    prepared = prepare(problem, plan, arguments.config, executor, console, dry_run=arguments.dry_run)
    if arguments.dry_run:
        say(console, f"nothing was started; what would be lies in {from_here(prepared.run.path / 'scripts')}")
        return 0
    return begin(prepared, plan, console, yes=arguments.yes, detach=arguments.detach)


def prepare(
    problem: Problem,
    plan: Plan,
    config: Path,
    executor: str,
    console: Console,
    *,
    continues: Mapping[str, Sequence[str]] = {},
    dry_run: bool = False,
) -> Prepared:
    """Make the run directory with all that its sites read, its plan's page and first event; nothing is started.

    `continues`: see `launch.run_directory.stage`.
    """
    if executor == SLURM:
        from launch.slurm.prepare import prepare_slurm

        prepared = prepare_slurm(problem, plan, config, continues)
    else:
        prepared = prepare_local(problem, plan, config, continues=continues, dry_run=dry_run)
    write_plan_page(prepared.run, plan, problem)
    log_planned(prepared.run, plan, problem.experiment)
    say(console, f"run {prepared.run.id} in {from_here(prepared.run.path)}")
    return prepared
