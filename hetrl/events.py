"""Append-only JSON lines: `events.jsonl` (the truth about a run) and `metrics.jsonl` (one row per step).

An event is one JSON object per line: `time` (seconds since the epoch), `source` (launcher, or the controller's site),
`sequence` (counts up within a source) and `kind`, then what the kind carries.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON object as a line with a single write, so that concurrent writers do not interleave."""
    line = json.dumps(row, separators=(", ", ": ")) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a file; a missing file has none, a line that is still being written is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


class EventLog:
    """Writes the events of one source."""

    def __init__(self, path: Path, source: str) -> None:
        """Continue the numbering of this source where the file ends."""
        self.path, self.source = path, source
        self._next = sum(1 for row in read_lines(path) if row["source"] == source)

    def append(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        row = {"time": round(time.time(), 3), "source": self.source, "sequence": self._next, "kind": kind}
        append_line(self.path, {**row, **fields})
        self._next += 1
