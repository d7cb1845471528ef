"""`hetrl plan`, and the plan of `hetrl submit`: read the experiment, solve or read a plan, check it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console

import hetrl
from hetrl.describe.experiment import BOUNDS, Planner
from hetrl.describe.measured import Measured
from hetrl.describe.measured_files import is_stale
from hetrl.describe.measured_links import MeasuredLinks
from hetrl.describe.yaml_file import explain
from hetrl.errors import HetrlError, UsageError
from hetrl.plan.plan import Plan
from hetrl.problem import Problem, objective_of, read_problem
from launch.show import charges_line, from_here, progress_line
from launch.verbs.arguments import check_writable

if TYPE_CHECKING:  # numpy and pulp, which the search brings, are slow to load
    from hetrl.search import Progress

_DIFFERS = 0.01  # a prediction that is off by more is of other numbers: an edited plan, other rates, other links


def problem_at(path: Path) -> Problem:
    """Read an experiment file; warns of measured files that are older than a week."""
    problem = read_problem(path)
    if problem.files is not None:
        warn_of_stale({**problem.files.measured, **problem.files.measured_links})
    return problem


def plan_command(arguments: argparse.Namespace) -> int:
    """Print a plan as a table or JSON on stdout, and write it to a file where one is named."""
    problem = problem_at(arguments.config)
    if arguments.output is not None:
        check_writable(arguments.output, "plan")
    plan = solve_problem(problem, planner_of(arguments, problem.experiment.planner), narrow=arguments.space == "ilp")
    document = json.dumps(plan.to_json(), indent=2)
    if arguments.output is not None:
        try:
            arguments.output.write_text(document + "\n")
        except OSError as error:
            print(document)  # it took a search
            raise HetrlError(f"{arguments.output}: cannot write the plan ({error.strerror})") from None
        print(f"the plan is in {arguments.output}", file=sys.stderr)
    if arguments.json:
        print(document)
    else:
        from hetrl.report.tables import asked_table

        console = Console()
        print_plan(console, plan, problem)
        console.print(asked_table(plan, problem.topology))
    return 0


def planner_of(arguments: argparse.Namespace, planner: Planner) -> Planner:
    """Return the experiment's section `planner` with what the command line says instead.

    Another objective, or a bound, which implies its objective, leaves neither objective nor bound of the experiment.
    Raises UsageError for a bound that is not one of the objective.
    """
    keys = ("solver", "objective", "budget_seconds", "evaluations", "seed", "processes", *BOUNDS)
    given = {key: value for key in keys if (value := getattr(arguments, key)) is not None}
    aims = {"objective", *BOUNDS}
    kept = planner.model_dump(exclude=aims if aims & given.keys() else set())
    try:
        return Planner.model_validate(kept | given)
    except ValidationError as error:
        raise UsageError(explain(error, Planner, "planner")) from None


def solve_problem(problem: Problem, planner: Planner | None = None, narrow: bool = False) -> Plan:
    """Return the solver's plan; the talk goes to stderr.

    `planner` takes the place of the experiment's; `narrow` keeps sha-ea to the plan space of ilp.
    """
    planner = planner or problem.experiment.planner
    solver, budget = planner.solver, planner.budget_seconds
    asked = replace(problem, objective=objective_of(problem.experiment, planner))
    talk = Console(stderr=True)
    with talk.status(f"planning with {solver}, at most {budget:g} s") as status:
        began = time.monotonic()

        def report(progress: Progress) -> None:
            status.update(progress_line(progress, solver, time.monotonic() - began, budget))

        plan = hetrl.solve(
            asked,
            solver,
            budget,
            planner.seed,
            report=report,
            evaluations=planner.evaluations,
            narrow=narrow,
            processes=planner.processes,
        )
    tell_solver(plan, planner)
    return plan


# docs/benchmarks.md, `search`: plans were up to 80 % slower than the best known after 20,000 evaluations, up to 14 %
# after 50,000, up to 6 % after 200,000.
ENOUGH = 100_000


def tell_solver(plan: Plan, planner: Planner) -> None:
    """Print who made a plan, and what stands behind it: too short a search, a baseline's tuning, a proven bound."""
    from hetrl.search.baselines import TUNING

    found = plan.solver
    print(f"planned with {found.name} in {found.seconds:.1f} s ({found.evaluations} evaluations)", file=sys.stderr)
    wanted = planner.evaluations or ENOUGH
    if found.name == "sha-ea" and found.evaluations < wanted and found.seconds >= planner.budget_seconds:
        print(
            f"notice: the clock ended the search after {found.evaluations:,} plans; the best may be far from what so "
            "few give, and another call may find another plan: raise planner.budget_seconds (--budget) from "
            f"{planner.budget_seconds:g}, or say how many to compare (--evaluations)",
            file=sys.stderr,
        )
    if found.name in TUNING:
        print(f"baseline {found.name}, tuned: {TUNING[found.name]}", file=sys.stderr)
    if found.bound_seconds is not None:
        takes = f"this one takes {plan.predicted.iteration_seconds:.2f} s"
        least = f"no plan of its space takes less than {found.bound_seconds:.2f} s"
        print(f"{found.status}: {takes} by the full model; {least} by the program's constants", file=sys.stderr)


def given_plan(path: Path, problem: Problem) -> Plan:
    """Read a plan file and check it against the experiment; warns where it was made for other inputs.

    So it does where now something else is predicted of it, which it has then, and where that breaks a bound of the
    experiment: who gives a plan decides. Raises UsageError where it is not a plan or breaks a constraint.
    """
    from hetrl.cost.check import check
    from hetrl.cost.iteration import with_prediction
    from hetrl.cost.objective import bounds
    from hetrl.plan.document import read_plan

    plan = read_plan(path)
    check(plan, problem.model)
    changed = [name for name, digest in problem.digests.items() if plan.inputs.get(name) != digest]
    if changed:
        print(f"warning: {path} was made for another {' and another '.join(changed)}", file=sys.stderr)
    anew = with_prediction(plan, problem.model)
    before, after = plan.predicted.iteration_seconds, anew.predicted.iteration_seconds
    if abs(before - after) > _DIFFERS * after:
        print(f"warning: the plan was made when {before:.3g} s were predicted; {after:.3g} s are now", file=sys.stderr)
        plan = anew
    for bound in bounds(plan, problem.topology, problem.objective):
        if bound.excess > 0:
            has = bound.spoken(f"{bound.found:.3g}")
            print(f"warning: the plan breaks a bound of the experiment: it {has}", file=sys.stderr)
    return plan


def print_sites(console: Console, problem: Problem) -> None:
    """Print the sites and their links."""
    from hetrl.report.tables import links_table, sites_table

    console.print(sites_table(problem.topology, _uncalibrated(problem)))
    if problem.topology.links:
        console.print(links_table(problem.topology))


def print_plan(console: Console, plan: Plan, problem: Problem) -> None:
    """Print the plan, and what its jobs hold and cost."""
    from hetrl.report.tables import plan_table

    console.print(plan_table(plan, problem.workload, problem.topology, _uncalibrated(problem)))
    console.print(charges_line(plan, problem.topology, problem.experiment.steps), highlight=False)


def _uncalibrated(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Return the GPU types of the topology whose efficiencies no measurement stands behind."""
    return problem.efficiencies.uncalibrated(device.gpu for device in problem.topology.devices)


def warn_of_stale(files: Mapping[Path, Measured | MeasuredLinks]) -> None:
    """Warn of files older than a week."""
    now = datetime.now(UTC)
    for path, one in files.items():
        if is_stale(one.measured_at, now):
            command = "hetrl probe" if isinstance(one, MeasuredLinks) else "hetrl profile"
            date = f"{one.measured_at:%Y-%m-%d}"
            print(f"warning: {from_here(path)} is of {date}; measure again with `{command}`", file=sys.stderr)
