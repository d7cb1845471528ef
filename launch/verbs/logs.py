"""`hetrl logs`: what the processes of a run printed, all sites merged, each line with its site and process."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hetrl.errors import UsageError, nearest
from launch.collect import Collector
from launch.local import processes_of
from launch.run_directory import Run, find_run, lead_site_of
from launch.slurm.run import SlurmRun, read_slurm_run
from launch.slurm.watch import fetch_logs, living_jobs, refresh
from launch.state import State

FOLLOW_SECONDS = 0.2


def logs_command(arguments: argparse.Namespace) -> int:
    """Print the end of each log, then with `-f` what comes, until the run is over."""
    run = find_run(arguments.run)
    slurm = read_slurm_run(run)
    if slurm is not None:
        fetch_logs(run, slurm)
    tails = [Tail(path, label) for path, label in chosen_logs(run, arguments.site, arguments.process)]
    width = max((len(tail.label) for tail in tails), default=0)
    for tail in tails:
        for line in tail.last(arguments.lines, final=not arguments.follow):
            print(f"{tail.label:<{width}} | {line}", flush=True)
    if arguments.follow:
        _follow(run, slurm, tails, lambda: chosen_logs(run, arguments.site, arguments.process), width)
    return 0


def chosen_logs(run: Run, site: str | None, process: str | None) -> list[tuple[Path, str]]:
    """Return (log, `site/process`) of each process asked for; raises UsageError for a name that is not there."""
    found = sorted((run.path / "logs").glob("*/*.log"))
    for asked, known, what in (
        (site, {path.parent.name for path in found}, "site"),
        (process, {path.stem for path in found if site in (None, path.parent.name)}, "process"),
    ):
        if asked is not None and asked not in known:
            hint = nearest(asked, known) or f"; known: {', '.join(sorted(known)) or 'none yet'}"
            raise UsageError(f'{run.id}: no log of {what} "{asked}"{hint}')
    return [
        (path, f"{path.parent.name}/{path.stem}")
        for path in found
        if site in (None, path.parent.name) and process in (None, path.stem)
    ]


class Tail:
    """Reads one log on."""

    def __init__(self, path: Path, label: str) -> None:
        """Start at the beginning of the file; `label` stands before its lines."""
        self.path, self.label = path, label
        self._offset, self._rest = 0, b""

    def last(self, lines: int, *, final: bool = False) -> list[str]:
        """Return the last lines that are whole by now and go on behind them; `final` as of `read`."""
        found = self.read(final)
        return found[-lines:] if lines else []

    def read(self, final: bool = False) -> list[str]:
        """Return the lines that were completed since; `final` takes a last line without an end too."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if final and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        shown = (line.decode(errors="replace").splitlines() for line in whole)  # of a bar, each of its states
        return [line for lines in shown for line in lines or [""]]


def is_over(state: State) -> bool:
    """Return whether nothing of a local run lives; one without a last word may still get it from its launcher."""
    known = [*state.processes, *([state.launcher] if state.launcher and not state.ended else [])]
    return (state.ended or bool(known)) and not processes_of(known)


def _follow(
    run: Run, slurm: SlurmRun | None, tails: list[Tail], chosen: Callable[[], list[tuple[Path, str]]], width: int
) -> None:
    """Print what is added to the logs, and those that appear, until nothing of the run is alive."""
    collector, over = Collector(run, lead_site_of(run)), False
    while True:
        known = {tail.path for tail in tails}
        tails += [Tail(path, label) for path, label in chosen() if path not in known]
        for tail in tails:
            for line in tail.read(final=over):
                print(f"{tail.label:<{width}} | {line}", flush=True)
        if over:
            if slurm is None and not collector.state.ended:
                print(f"{run.id}: its processes are gone without a last word", file=sys.stderr)
            return
        if slurm is not None:
            time.sleep(slurm.poll_seconds)
            state = refresh(run, slurm, "logs", logs=True)
            over = state.ended and not living_jobs(state)
        else:
            time.sleep(FOLLOW_SECONDS)
            collector.collect()
            over = is_over(collector.state)
