"""`hetrl rehearse`: a whole experiment with emulated engines, here or at its sites, beside what was predicted."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from hetrl.describe.yaml_file import find
from hetrl.errors import UsageError
from hetrl.files import parse_lines
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from hetrl.report.tables import add_row
from launch.executor import HERE, SLURM, ExecutorName, choose_executor
from launch.life import Manner, ended, live
from launch.rehearsal import Compared, Settings, compare, document, ratio, rehearsed, settings_of
from launch.render import check_startable
from launch.show import from_here
from launch.verbs.planning import given_plan, problem_at, solve_problem
from launch.verbs.prepare import prepare


def rehearse_command(arguments: argparse.Namespace) -> int:
    """Run the experiment with emulated engines, print predicted and rehearsed seconds; returns the run's exit code."""
    problem = problem_at(arguments.config)
    plan = given_plan(arguments.plan, problem) if arguments.plan else solve_problem(problem)
    check_startable(plan, problem.experiment.launch.start_with)
    executor = _executor(problem) if arguments.at_sites else HERE
    given = arguments.steps, arguments.speed, arguments.noise, arguments.bytes_share
    settings = settings_of(plan, problem, *given, whole_texts=executor != HERE)
    talk, began = Console(stderr=True), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hetrl-rehearsal-") as directory:
        rehearsal, findings = rehearsed(problem, settings, Path(directory) if executor == HERE else None)
        _tell(plan, settings, findings, "on this machine" if executor == HERE else "as jobs of a core each")
        config = Path(directory) / "rehearsal.yaml"
        config.write_text(yaml.safe_dump(_document(rehearsal, arguments.config), sort_keys=False))
        prepared = prepare(rehearsal, plan, config, executor, talk)
        prepared.agree(talk, True)
        outcome, remains, _ = live(prepared.run, plan, prepared.executor, talk, Manner(yes=True))
    if outcome.phase != "finished":
        return ended(prepared.run, outcome, talk, remains)
    rows = list(parse_lines(prepared.run.metrics.read_bytes()))
    compared, seconds = compare(rows, plan, settings), time.monotonic() - began
    if arguments.json:
        print(json.dumps(document(compared, settings, findings, prepared.run.id, seconds), indent=2))
    else:
        Console().print(table(compared, settings))
        print(f"everything about it is in {from_here(prepared.run.path)}", file=sys.stderr)
    return 0


def _executor(problem: Problem) -> ExecutorName:
    """Return who starts jobs at the sites; UsageError where these are no clusters."""
    if choose_executor(problem.experiment.launch.executor, problem.scenario.sites) != SLURM:
        raise UsageError("--at-sites: these sites are this machine; leave it out, or set launch.executor: slurm")
    return SLURM


def _document(rehearsal: Problem, config: Path) -> dict[str, Any]:
    """Return the rehearsal's experiment as it is written down, elsewhere than the experiment itself."""
    document: dict[str, Any] = rehearsal.experiment.model_dump(mode="json")
    if templates := document["launch"]["templates"]:
        found = find(templates, [Path(), config.parent], f"{config}: launch.templates")
        document["launch"]["templates"] = str(found.absolute())
    return document


def _tell(plan: Plan, settings: Settings, findings: Sequence[str], where: str) -> None:
    """Say beforehand what is not as it will be."""
    emulation, ranks = settings.emulation, sum(len(task.devices) for task in plan.tasks.values())
    print(
        f"rehearsing {settings.steps} steps of {ranks} ranks at {len(plan.site_order)} sites {where}: engines "
        f"are emulated at {emulation.speed:g} times their speed, rates and lengths within {emulation.noise:.0%}, "
        f"{emulation.bytes_share:.2g} of the bytes of weights, gradients and activations"
        f"{f', a token counts as {each}' if (each := emulation.tokens_each) > 1 else ''}",
        file=sys.stderr,
    )
    for finding in findings:
        print(f"found: {finding}", file=sys.stderr)


def table(compared: Sequence[Compared], settings: Settings) -> Table:
    """Return a row per task and one for the iteration."""
    emulation = settings.emulation
    title = f"Seconds, mean of {settings.counted} steps (speed {emulation.speed:g}, noise {emulation.noise:.0%})"
    made = Table(title=title, title_justify="left")
    made.add_column("")
    for name in ("predicted", "rehearsed", "rehearsed / predicted"):
        made.add_column(name, justify="right")
    for one in compared:
        over = ratio(one)
        shown = "" if math.isnan(over) else f"{over:.2f}"
        add_row(made, one.name, f"{one.predicted:.3g}", f"{one.rehearsed:.3g}", shown)
    return made
