"""Before a run is at its Slurm sites: its directory here, what the sites say to it, and the user's word."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.runtime.checkpoints.places import EarlierRun
from launch.executor import Prepared
from launch.reports import write_plan_page
from launch.run_directory import Run
from launch.screen import say
from launch.show import from_here
from launch.slurm.doctor import Answer
from launch.slurm.executor import SlurmExecutor
from launch.slurm.handing_on import taking_over
from launch.slurm.preflight import preflight, preview_table
from launch.slurm.run import read_slurm_run, write_slurm_run
from launch.slurm.stage import Staged, describe, dry_run_text, stage_slurm


def prepare_slurm(
    problem: Problem,
    plan: Plan,
    config: Path,
    continues: Mapping[str, Sequence[EarlierRun]] = {},
    holding: Run | None = None,
) -> Prepared:
    """Make the run directory with all that its sites read (`continues`: see `stage`); nothing is copied or submitted.

    Its jobs take over those of the run that is `holding` its nodes, where they fit. Whether it shall be, the sites say,
    and then the user. Raises what `stage_slurm` does.
    """
    staged = stage_slurm(problem, plan, config, continues=continues)
    slurm = describe(problem, plan, staged)
    if holding is not None and (earlier := read_slurm_run(holding)) is not None:
        slurm = taking_over(slurm, staged.run, earlier, holding)
    write_slurm_run(staged.run, slurm)

    def agree(console: Console, always_yes: bool) -> bool:
        with console.status("asking every site"):
            answers = preflight(problem, staged.scripts)
        _show(console, problem, plan, staged, answers)
        return always_yes or _agreed()

    return Prepared(staged.run, partial(SlurmExecutor, staged.run, slurm), agree)


def _show(console: Console, problem: Problem, plan: Plan, staged: Staged, answers: Mapping[str, Answer]) -> None:
    """Print what the sites had to remark, and what would be submitted."""
    for site, answer in answers.items():
        for finding in (each for each in answer.findings if each.verdict == "warning"):
            print(f"note: {site}: {finding.what}: {finding.found}; {finding.remedy}", file=sys.stderr)
    console.print(preview_table(problem, plan, staged.scripts, answers))


def _agreed() -> bool:
    """Ask on a terminal; without one the answer is yes."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    print("Submit? [Y/n] ", end="", file=sys.stderr, flush=True)
    return not sys.stdin.readline().strip().lower().startswith("n")


def dry_run(problem: Problem, plan: Plan, config: Path, console: Console) -> int:
    """Write what would be submitted and print the commands that would do so; no site is asked anything."""
    staged = stage_slurm(problem, plan, config, dry_run=True)
    write_plan_page(staged.run, plan, problem)
    print(dry_run_text(staged, {site.name: site for site in problem.scenario.sites}))
    say(console, f"nothing was submitted; what would be lies in {from_here(staged.run.path / 'scripts')}")
    return 0
