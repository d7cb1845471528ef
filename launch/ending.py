"""How a run ends: the outcome of an error, the last event, and what is printed."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hetrl.errors import HetrlError
from hetrl.events import EventLog
from launch.follow import Outcome
from launch.run_directory import Run
from launch.screen import say
from launch.show import columns, from_here


def note_end(events: EventLog, outcome: Outcome) -> None:
    """Write the event that ends the run."""
    fields = {} if outcome.phase == "finished" else {"cause": outcome.cause, "exit_code": outcome.exit_code}
    events.append(outcome.phase, **fields)


def failure(run: Run, error: Exception) -> Outcome:
    """Return how an error of the launcher ends the run; the traceback of a defect goes to logs/launcher.log."""
    if isinstance(error, HetrlError):
        return Outcome("failed", error.exit_code, str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return Outcome("failed", 1, f"{from_here(run.path)}: {error.strerror}; make room, then submit again")
    with contextlib.suppress(OSError), run.launcher_log.open("a") as log:
        traceback.print_exception(error, file=log)
    where = from_here(run.launcher_log)
    return Outcome("failed", 1, f"the launcher failed: {type(error).__name__}: {error}; see {where}")


def report_end(run: Run, outcome: Outcome, console: Console, remains: Sequence[str] = ()) -> int:
    """Print what the run achieved or why it ended, and where everything lies; returns the exit code.

    `remains` are the parts of the run that could not be ended.
    """
    if outcome.phase == "finished" and run.summary.exists():
        from hetrl.report.tables import summary_table

        console.print(summary_table(json.loads(run.summary.read_text())))
    if outcome.phase != "finished":
        print(f"{'error: ' if outcome.phase == 'failed' else ''}{outcome.cause}", file=sys.stderr)
        left = "" if remains else "; no process of it is left"
        print(f"run {run.id} is {outcome.phase}{left}", file=sys.stderr)
    for line in remains:
        print(f"error: not ended (`hetrl cancel {run.id}` tries again): {line}", file=sys.stderr)
    say(console, f"in {from_here(run.path)}:")
    say(console, columns([(f"  {name}", what) for name, what in _WHERE.items() if _has_content(run.path / name)]))
    return outcome.exit_code


def _has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


_WHERE = {
    "report.html": "the run as a page",
    "plan.html": "the plan as a page",
    "summary.json": "what it achieved",
    "metrics.jsonl": "a row per step",
    "events.jsonl": "what happened, and when",
    "logs": "what each process printed",
    "checkpoints": "the model's states",
}
