"""Find and read the files of a data set: JSON lines, one JSON object per file, and parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hetrl.errors import UsageError
from hetrl.runtime.data.formats import FORMATS, Row

SUFFIXES = (".jsonl", ".json", ".parquet")


def files_of(path: Path, kind: str, split: str) -> tuple[Path, ...]:
    """Return the files of a split, sorted: `path` itself if it is a file, else what a directory has of these, in turn.

    `SPLIT.jsonl`, `SPLIT.parquet`, `SPLIT-00000-of-00001.parquet` (as the Hugging Face hub has them) in the directory
    or the folders where the data set keeps them, then `SPLIT/**/*.json` (as MATH was first published). Raises
    UsageError that says what was looked for.
    """
    if path.is_file():
        return (path,)
    if not path.exists():
        raise UsageError(f"data.path: {path}: No such file or directory")
    names = [f"{split}{suffix}" for suffix in SUFFIXES] + [f"{split}-*{suffix}" for suffix in SUFFIXES]
    places = [f"{folder}{name}" for folder in FORMATS[kind].folders for name in names]
    for pattern in (*places, f"{split}/**/*.json"):
        if found := sorted(file for file in path.glob(pattern) if file.is_file()):
            return tuple(found)
    folders = " or ".join(f"{path}/{folder}" for folder in FORMATS[kind].folders)
    raise UsageError(
        f'data.path: no file of the split "{split}" under {folders} ({split}.jsonl, {split}.parquet, '
        f"{split}-*.parquet); name a file, or another data.split"
    )


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; raises UsageError with file and line where one is not an object."""
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UsageError(f"data.path: {path}: {error.strerror}") from None
    if path.suffix == ".json":
        yield _row(f"{path}:1", content)
        return
    for number, line in enumerate(content.split(b"\n"), start=1):  # only a newline ends a line: texts may hold U+2028
        if line.strip():
            yield _row(f"{path}:{number}", line)


def _row(place: str, content: bytes) -> Row:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UsageError(f"{place}: expected a JSON object; {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{place}: expected a JSON object, found {type(values).__name__}")
    return Row(place, values)


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UsageError(f"data.path: {path}: reading parquet needs pyarrow; install the extra `runtime`") from None
    try:
        rows = parquet.ParquetFile(path).read().to_pylist()
    except (OSError, ArrowException) as error:
        raise UsageError(f"data.path: {path}: not parquet: {error}") from None
    for number, values in enumerate(rows, start=1):
        yield Row(f"{path}:{number}", values)
