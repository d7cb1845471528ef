"""`hetrl plan`, and the plan of `hetrl submit`: read the experiment, solve or read a plan, check it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from hetrl.config import Problem, read_problem
from hetrl.errors import HetrlError
from hetrl.plan import Plan
from launch.measurements import put_in_force
from launch.show import progress_line


def problem_of(path: Path) -> Problem:
    """Read an experiment file, and let the measured files that it names decide what is predicted from here on."""
    problem = read_problem(path)
    put_in_force(problem.measured)
    return problem


def plan_command(arguments: argparse.Namespace) -> int:
    """Print a plan as a table or JSON on stdout, and write it to a file where one is named."""
    problem = problem_of(arguments.config)
    plan = solve_problem(problem, arguments.solver, arguments.budget, arguments.seed)
    document = json.dumps(plan.to_json(), indent=2)
    if arguments.output is not None:
        try:
            arguments.output.write_text(document + "\n")
        except OSError as error:
            raise HetrlError(f"{arguments.output}: cannot write the plan ({error.strerror})") from None
        print(f"the plan is in {arguments.output}", file=sys.stderr)
    if arguments.json:
        print(document)
    else:
        print_plan(Console(), plan, problem)
    return 0


def solve_problem(
    problem: Problem, solver: str | None = None, budget_seconds: float | None = None, seed: int | None = None
) -> Plan:
    """Return the solver's plan; what is not given comes from the experiment. The talk goes to stderr."""
    from hetrl import search

    planner = problem.experiment.planner
    solver = solver or planner.solver
    budget = planner.budget_seconds if budget_seconds is None else budget_seconds
    talk = Console(stderr=True)
    seed = planner.seed if seed is None else seed
    with talk.status(f"planning with {solver}, at most {budget:g} s") as status:
        asked = search.Problem(problem.topology, problem.workload)
        began = time.monotonic()

        def report(progress: search.Progress) -> None:
            status.update(progress_line(progress, solver, time.monotonic() - began, budget))

        plan = search.solve(asked, solver, budget, seed, problem.digests, report=report)
    found = plan.solver
    print(f"planned with {found.name} in {found.seconds:.1f} s ({found.evaluations} evaluations)", file=sys.stderr)
    if found.bound_seconds is not None:
        takes = f"this one takes {plan.predicted.iteration_seconds:.2f} s"
        least = f"no plan of its space takes less than {found.bound_seconds:.2f} s"
        print(f"{found.status}: {takes} by the full model; {least} by the program's constants", file=sys.stderr)
    return plan


def given_plan(path: Path, problem: Problem) -> Plan:
    """Read a plan file and check it against the experiment; warns where it was made for other inputs.

    Raises UsageError where it is not a plan or breaks a constraint.
    """
    from hetrl.check import check
    from hetrl.plan_json import read_plan

    plan = read_plan(path)
    check(plan, problem.topology, problem.workload)
    changed = [name for name, digest in problem.digests.items() if plan.inputs.get(name) != digest]
    if changed:
        print(f"warning: {path} was made for another {' and another '.join(changed)}", file=sys.stderr)
    return plan


def print_sites(console: Console, problem: Problem) -> None:
    """Print the sites and their links."""
    from hetrl.report.tables import links_table, sites_table

    console.print(sites_table(problem.topology, _uncalibrated(problem)))
    if problem.topology.links:
        console.print(links_table(problem.topology))


def print_plan(console: Console, plan: Plan, problem: Problem) -> None:
    """Print the plan."""
    from hetrl.report.tables import plan_table

    console.print(plan_table(plan, problem.workload, problem.topology, _uncalibrated(problem)))


def _uncalibrated(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Return the GPU types of the topology whose efficiencies no measurement stands behind."""
    from hetrl.cost.efficiency import uncalibrated

    return uncalibrated(device.gpu for device in problem.topology.devices)
