"""A run's directory, made from a plan: what every verb that starts one begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.runtime.checkpoints.places import EarlierRun
from launch.collect import log_planned
from launch.executor import SLURM, Prepared
from launch.local import prepare_local
from launch.reports import write_plan_page
from launch.run_directory import Run
from launch.screen import say
from launch.show import from_here


def prepare(
    problem: Problem,
    plan: Plan,
    config: Path,
    executor: str,
    console: Console,
    *,
    continues: Mapping[str, Sequence[EarlierRun]] = {},
    holding: Run | None = None,
    dry_run: bool = False,
) -> Prepared:
    """Make the run directory with all that its sites read, its plan's page and first event; nothing is started.

    `continues`: see `launch.run_directory.stage`. `holding` is a run at Slurm sites that failed and keeps its nodes.
    """
    if executor == SLURM:
        from launch.slurm.prepare import prepare_slurm

        prepared = prepare_slurm(problem, plan, config, continues, holding)
    else:
        prepared = prepare_local(problem, plan, config, continues=continues, dry_run=dry_run)
    write_plan_page(prepared.run, plan, problem)
    log_planned(prepared.run, plan, problem.experiment)
    say(console, f"run {prepared.run.id} in {from_here(prepared.run.path)}")
    return prepared
