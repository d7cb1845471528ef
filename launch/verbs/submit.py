"""`hetrl submit`: plan, make the run directory, start every site, follow the run to its end."""

from __future__ import annotations

import argparse

from rich.console import Console

from hetrl.runtime.run.support import check_runnable
from launch.executor import SLURM, choose_executor
from launch.render import check_startable
from launch.screen import say
from launch.show import from_here
from launch.verbs.planning import given_plan, print_plan, print_sites, problem_at, solve_problem
from launch.verbs.prepare import prepare
from launch.verbs.resume import begin_and_restart, check_detach


def submit_command(arguments: argparse.Namespace) -> int:
    """Start a run and follow it; returns the exit code of its end."""
    console = Console()
    problem = problem_at(arguments.config)
    executor = choose_executor(problem.experiment.launch.executor, problem.scenario.sites)
    check_detach(arguments.detach, executor)
    if not (arguments.dry_run and executor == SLURM):  # scripts can be looked at without the data and the weights
        check_runnable(problem.experiment)
    print_sites(console, problem)
    plan = given_plan(arguments.plan, problem) if arguments.plan else solve_problem(problem)
    print_plan(console, plan, problem)
    check_startable(plan, problem.experiment.launch.start_with)
    if executor == SLURM and arguments.dry_run:
        from launch.slurm.prepare import dry_run

        return dry_run(problem, plan, arguments.config, console)
    prepared = prepare(problem, plan, arguments.config, executor, console, dry_run=arguments.dry_run)
    if arguments.dry_run:
        say(console, f"nothing was started; what would be lies in {from_here(prepared.run.path / 'scripts')}")
        return 0
    return begin_and_restart(prepared, plan, arguments.config, console, yes=arguments.yes, detach=arguments.detach)
