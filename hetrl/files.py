"""Files that readers see either as they were or as a whole, files that only their owner reads, append-only lines.

Lines are `events.jsonl` (the truth about a run) and `metrics.jsonl` (one row per step). An event is one JSON object per
line: `time` (seconds since the epoch), `source` (launcher, or the controller's site), `sequence` (counts up within a
source) and `kind`, then what the kind carries.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetrl.errors import HetrlError, UsageError


def replace_text(path: Path, text: str) -> None:
    """Write a file in one go: whoever reads it, or writes it at the same time, never meets a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_json(path: Path, document: object) -> None:
    """Write a JSON file in one go, for people to read as well."""
    replace_text(path, json.dumps(document, indent=2) + "\n")


def write_private(path: Path | str, text: str, what: str) -> None:
    """Write a file of mode 0600 that was not there; `what` is what errors call it.

    Raises HetrlError where it exists already or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise HetrlError(f"{path}: the {what} exists already; it is never written over, remove it first") from error
    except OSError as error:
        raise HetrlError(f"{path}: cannot write the {what} ({error.strerror})") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def read_private(path: Path | str, what: str) -> str:
    """Return the text of a file that nobody but its owner may read; `what` is what errors call it.

    Raises HetrlError where others may, or where it cannot be read.
    """
    try:
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise HetrlError(
                    f"{path}: others can read this {what} (mode {mode & 0o777:03o}); chmod 600 {path}, "
                    "and make another one if they may have read it"
                )
            return file.read()
    except OSError as error:
        raise HetrlError(f"{path}: cannot read the {what} ({error.strerror})") from error
    except UnicodeDecodeError:
        raise HetrlError(f"{path}: not a {what}") from None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds; UsageError where it cannot be read or is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append one JSON object as a line with a single write, so that concurrent writers do not interleave.

    A line that an earlier writer left torn (a full disk, a crash) is closed first. Raises OSError where the disk
    is full.
    """
    line = (json.dumps(row, separators=(", ", ": ")) + "\n").encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def parse_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of some bytes; a line that is still being written, or was torn, is left out."""
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a file; a missing file has none."""
    try:
        yield from parse_lines(path.read_bytes())
    except FileNotFoundError:
        return


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
