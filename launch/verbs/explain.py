"""`hetrl explain`: why a plan is as it is, as text, JSON and the page of the plan."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

import hetrl
from hetrl.errors import HetrlError, UsageError
from hetrl.files import replace_text
from launch.verbs.arguments import check_writable
from launch.verbs.planning import given_plan, problem_at

if TYPE_CHECKING:
    from hetrl.explanation import Explanation
    from hetrl.problem import Problem


def explain_command(arguments: argparse.Namespace) -> int:
    """Print the explanation of a plan file; write its page where one is asked for."""
    from hetrl.report.explain_tables import explanation_tables

    if arguments.html is not None:
        check_writable(arguments.html, "page")
    elif arguments.play:
        raise UsageError("--play draws on the page: say where that is written with --html")
    problem = problem_at(arguments.config or _config_beside(arguments.plan))
    plan = given_plan(arguments.plan, problem)
    talk = Console(stderr=True)
    with talk.status("asking the cost model"):
        found = hetrl.explain(plan, problem)
    if plan.solver.objective != problem.objective.kind:
        print(
            f"notice: the plan was made for objective {plan.solver.objective}, the experiment asks for "
            f"{problem.objective.kind}, by which idle GPUs and what-ifs are judged; say the same under its planner",
            file=sys.stderr,
        )
    if arguments.what_ifs is not None:
        found = _studied(found, problem, arguments.what_ifs, arguments.seed, talk)
    if arguments.budgets is not None:
        found = _with_curve(found, problem, arguments.budgets, arguments.seed, talk)
    if arguments.html is not None:
        _write_page(found, problem, arguments, talk)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        Console().print(explanation_tables(found, problem.topology))
    return 0


def _config_beside(plan: Path) -> Path:
    beside = plan.parent / "config.yaml"
    if not beside.exists():
        raise UsageError(f"{plan}: which experiment is it for? There is no {beside}; name the file with --config")
    return beside


def _studied(found: Explanation, problem: Problem, budget_seconds: float, seed: int, talk: Console) -> Explanation:
    from hetrl.explanation import study

    with talk.status("planning") as status:
        report = lambda name: status.update(f"planning {name}, at most {budget_seconds:g} s")  # noqa: E731
        return replace(found, study=study(found.plan, problem, budget_seconds, seed, report))


def _with_curve(found: Explanation, problem: Problem, budget_seconds: float, seed: int, talk: Console) -> Explanation:
    from hetrl.explanation import curve

    with talk.status("planning") as status:
        report = lambda name: status.update(f"planning for {name}, at most {budget_seconds:g} s")  # noqa: E731
        return replace(found, curve=curve(found.plan, problem, budget_seconds, seed, report))


def _write_page(found: Explanation, problem: Problem, arguments: argparse.Namespace, talk: Console) -> None:
    from hetrl.report.plan_page import plan_page
    from hetrl.report.played import played

    play = None
    if arguments.play:
        with talk.status("playing the plan"):
            play = played(found.plan, hetrl.simulate(found.plan, problem, arguments.seed))
    page = plan_page(found.plan, problem.topology, problem.workload, found, play)
    try:
        _write(arguments.html, page)
    except OSError as error:
        raise HetrlError(f"{arguments.html}: cannot write the page ({error.strerror})") from None
    print(f"the page is in {arguments.html}", file=sys.stderr)


def _write(path: Path, page: str) -> None:
    if path.exists() and not path.is_file():
        path.write_text(page, encoding="utf-8")  # a device or a pipe must stay one
    else:
        replace_text(path.resolve(), page)  # a link still leads there
