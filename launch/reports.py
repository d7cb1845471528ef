"""The pages of a run: plan.html when it is planned, report.html while it runs and at its end.

`python -m launch.reports RUN_DIRECTORY` writes the second one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetrl.files import read_lines, replace_text
from hetrl.plan.document import read_plan
from hetrl.plan.plan import Plan
from hetrl.problem import Problem
from launch.run_directory import Run

REPORT_STEPS = 20


def report_is_due(event: Mapping[str, Any]) -> bool:
    """Return whether the run's page should be drawn again after an event."""
    return bool(event["kind"] == "step" and event["step"] % REPORT_STEPS == 1)


def write_plan_page(run: Run, plan: Plan, problem: Problem) -> None:
    """Write plan.html."""

    def page() -> str:
        from hetrl.explanation import explain
        from hetrl.report.plan_page import plan_page

        found = explain(plan, problem)
        return plan_page(plan, problem.topology, problem.workload, found)

    _write(run.path / "plan.html", page)


def draw_run_page(run: Run) -> None:
    """Write report.html in a process of its own: what it takes of memory grows with the run, and goes with it."""
    subprocess.run([sys.executable, "-m", "launch.reports", str(run.path)], start_new_session=True)


def write_run_page(run: Run, plan: Plan) -> None:
    """Write report.html from what is known by now; the summary is empty before the end."""

    def page() -> str:
        from hetrl.report.run_page import run_page

        summary = json.loads(run.summary.read_text()) if run.summary.exists() else {}
        metrics, events, site = list(read_lines(run.metrics)), list(read_lines(run.events)), _staged(run, plan)
        samples = list(read_lines(run.samples))
        return run_page(summary, metrics, events, plan, site.get("gpus"), site.get("held"), samples)

    _write(run.path / "report.html", page)


def _staged(run: Run, plan: Plan) -> dict[str, Any]:
    """Return what was staged for the lead site: the GPU of every device, what jobs hold; nothing where it was not."""
    staged = run.site(plan.lead_site) / "site.json"
    return dict(json.loads(staged.read_text())) if staged.exists() else {}


def _write(path: Path, page: Callable[[], str]) -> None:
    """Write a page; one that cannot be drawn is a warning, for a run is worth more than its picture."""
    try:
        replace_text(path, page())
    except Exception as error:
        print(f"warning: {path.name} was not written: {type(error).__name__}: {error}", file=sys.stderr)


if __name__ == "__main__":
    _run = Run(Path(sys.argv[1]))
    write_run_page(_run, read_plan(_run.path / "plan.json"))
