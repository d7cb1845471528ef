"""`hetrl simulate`: play a plan event by event, beside what the plan predicts; write the play as a Chrome trace."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import hetrl
from hetrl.errors import HetrlError
from hetrl.plan.plan import Plan
from hetrl.simulator import Simulated, chrome_trace
from launch.verbs.arguments import check_writable
from launch.verbs.planning import given_plan, problem_at


def simulate_command(arguments: argparse.Namespace) -> int:
    """Print the seconds of an iteration, predicted and simulated, as a table or JSON."""
    if arguments.trace is not None:
        check_writable(arguments.trace, "trace")
    problem = problem_at(arguments.config)
    plan = given_plan(arguments.plan, problem)
    found = hetrl.simulate(plan, problem, arguments.seed, arguments.iterations or None, arguments.noise)
    if arguments.trace is not None:
        _write_trace(found, plan, arguments.trace)
    if arguments.json:
        print(json.dumps(_document(found, plan, arguments.seed), indent=2))
    else:
        Console().print(_table(found, plan))
    if not found.steady and not arguments.iterations:
        print(f"warning: not steady after {found.iterations} iterations; the means may be off", file=sys.stderr)
    return 0


def _write_trace(found: Simulated, plan: Plan, path: Path) -> None:
    try:
        path.write_text(json.dumps(chrome_trace(found.spans, plan.site_order)) + "\n")
    except OSError as error:
        raise HetrlError(f"{path}: cannot write the trace ({error.strerror})") from None
    print(f"the trace is in {path}; open it at https://ui.perfetto.dev", file=sys.stderr)


def _document(found: Simulated, plan: Plan, seed: int) -> dict[str, object]:
    return {
        "seed": seed,
        "iterations": found.iterations,
        "steady": found.steady,
        "iteration_seconds": found.iteration_seconds,
        "predicted_iteration_seconds": plan.predicted.iteration_seconds,
        "tasks": dict(found.tasks),
        "wan_gb_per_iteration": dict(found.wan_gb),
        "dropped_groups": found.dropped,
    }


def _table(found: Simulated, plan: Plan) -> Table:
    """Return a row per task and one for the iteration."""
    table = Table(title=f"Seconds per iteration, mean of the last of {found.iterations}", title_justify="left")
    table.add_column("")
    for name in ("predicted", "simulated", "predicted / simulated"):
        table.add_column(name, justify="right")
    predicted = plan.predicted
    rows = [(name, predicted.tasks.get(name, 0.0), found.tasks[name]) for name in found.tasks]
    for name, before, seconds in [*rows, ("iteration", predicted.iteration_seconds, found.iteration_seconds)]:
        table.add_row(name, f"{before:.3g}", f"{seconds:.3g}", f"{before / seconds:.2f}" if seconds else "")
    return table
