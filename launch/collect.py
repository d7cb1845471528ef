"""Bring home what the controller wrote at the lead site: exactly once, whoever collects and however often.

events.jsonl    joins the launcher's events: a row is skipped where its (source, sequence) is there already
metrics.jsonl, samples.jsonl   mirrors: what lies here is a prefix of what lies there, so copying goes on at its length
summary.json    replaced when it changed
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hetrl.describe.experiment import Experiment
from hetrl.files import EventLog, append_line, parse_lines, replace_json
from hetrl.plan.plan import Plan
from launch.run_directory import LAUNCHER, Run
from launch.state import State, fold


class LineReader:
    """Reads the complete rows that were added to a file since the last time."""

    def __init__(self, path: Path) -> None:
        """Start at the beginning of a file that may not be there yet."""
        self.path, self.offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the rows that are whole by now; a line that is still being written comes next time."""
        data = _whole_lines(self.path, self.offset)
        self.offset += len(data)
        return list(parse_lines(data))


class Collector:
    """Collects one run; several may, in several processes."""

    def __init__(self, run: Run, lead_site: str) -> None:
        """Collect from the directory of the lead site; nothing is read yet."""
        self._run, self._lead = run, run.site(lead_site)
        self._here, self._there = LineReader(run.events), LineReader(self._lead / "events.jsonl")
        self._seen: set[tuple[str, int]] = set()
        self._written: dict[str, Any] | None = None
        self.state = State(run=run.id)

    def collect(self) -> list[dict[str, Any]]:
        """Copy what is complete and not here yet; return the run's events since the last call, in their order."""
        with _locked(self._run):
            rows = self._read_here()
            for row in self._there.read():
                if _identity(row) not in self._seen:
                    append_line(self._run.events, row)
            rows += self._read_here()
            self.state = fold(rows, self.state)
            if (document := self.state.to_json()) != self._written:
                replace_json(self._run.state, document)
                self._written = document
            _mirror(self._lead / "metrics.jsonl", self._run.metrics)
            _mirror(self._lead / "samples.jsonl", self._run.samples)
            _replace_if_changed(self._lead / "summary.json", self._run.summary)
        return rows

    def _read_here(self) -> list[dict[str, Any]]:
        rows = self._here.read()
        self._seen.update(_identity(row) for row in rows)
        return rows


def _identity(row: dict[str, Any]) -> tuple[str, int]:
    return row["source"], row["sequence"]


def _whole_lines(path: Path, offset: int) -> bytes:
    """Return the bytes from `offset` to the last end of a line."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def _mirror(source: Path, target: Path) -> None:
    """Append to `target` the complete lines of `source` that it lacks."""
    size = target.stat().st_size if target.exists() else 0
    if added := _whole_lines(source, size):
        with target.open("ab") as file:
            file.write(added)


def _replace_if_changed(source: Path, target: Path) -> None:
    """Copy a JSON document; one that is still being written is left for the next time."""
    try:
        stamp = source.stat().st_mtime_ns
        if target.exists() and target.stat().st_mtime_ns >= stamp:
            return
        document = json.loads(source.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return
    replace_json(target, document)


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    """Let one process at a time collect."""
    descriptor = os.open(run.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def log_planned(run: Run, plan: Plan, experiment: Experiment) -> None:
    """Write the run's first event and state: what was planned, and which process launches it."""
    launcher = {"pid": os.getpid(), "created": psutil.Process().create_time()}
    sites = list(plan.site_order)
    EventLog(run.events, LAUNCHER).append(
        "planned", run=run.id, name=experiment.name, sites=sites, steps=experiment.steps, launcher=launcher
    )
    Collector(run, plan.lead_site).collect()
