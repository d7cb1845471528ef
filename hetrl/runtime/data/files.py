"""The files of a data set (JSON lines, one JSON object per file, parquet), and what a row of each data set holds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from hetrl.errors import UsageError
from hetrl.runtime.data.math_answer import last_boxed, marked

SUFFIXES = (".jsonl", ".json", ".parquet")


class _Number(str):
    """A number with a point or an exponent, as the file has its digits: 5.10 is another text than 5.1."""


@dataclass(frozen=True)
class DataRow:
    """One row of a file and where it stands, `FILE:LINE` counted from 1."""

    place: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """Of a data set: the key of the question, its reader of answers, and the folders that a directory keeps files in.

    `folders` are globs that end in `/`, the directory itself being the empty one; `needs` completes "data.path: ...".
    """

    question: str
    answer: Callable[[DataRow], str]
    folders: tuple[str, ...]
    needs: str


def question_and_answer(kind: str, row: DataRow) -> tuple[str, str]:
    """Return both texts of a row; raises UsageError with its place where one is missing."""
    form = FORMATS[kind]
    return _text(row, form.question), form.answer(row)


def _text(row: DataRow, key: str) -> str:
    value = row.values.get(key)
    if not isinstance(value, str) or isinstance(value, _Number) or not value.strip():
        raise UsageError(f'{row.place}: expected a text under "{key}"; its keys are: {", ".join(row.values) or "none"}')
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f'{row.place}: "{key}" has half of a pair of surrogates (\\ud800 to \\udfff)') from None
    return value


def _plain(row: DataRow) -> str:
    value = row.values.get("answer")
    if isinstance(value, _Number) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):  # of parquet: as it would be written by hand
        return f"{Decimal(repr(value)):f}"
    return _text(row, "answer")


def _gsm8k(row: DataRow) -> str:
    """Return what follows `####`, without thousands separators (Cobbe et al. 2021, arXiv 2110.14168)."""
    answer = marked(_text(row, "answer"))
    if answer is None:
        raise UsageError(f'{row.place}: "answer" has no "#### " with the final answer behind it')
    return answer.replace(",", "")


def _math(row: DataRow) -> str:
    r"""Return `answer` (MATH-500), else the last balanced \boxed{} of `solution` (Hendrycks 2021, arXiv 2103.03874)."""
    if row.values.get("answer") is not None:
        return _plain(row)
    answer = last_boxed(_text(row, "solution"))
    if not answer:
        raise UsageError(f'{row.place}: "solution" has no balanced \\boxed{{}} with the final answer')
    return answer


_DIRECTORY = "a file of it (jsonl, parquet) or the directory as downloaded"
FORMATS: dict[str, Format] = {
    # main/ on the hub; socratic/ asks the same questions again.
    "gsm8k": Format("question", _gsm8k, ("", "main/", "data/", "grade_school_math/data/"), _DIRECTORY),
    # One folder per subject where there is no file of all.
    "math": Format("problem", _math, ("", "data/", "default/", "*/"), _DIRECTORY),
    "jsonl": Format("prompt", _plain, ("",), "the path of a file of JSON lines"),
}


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


def rows_of(path: Path) -> Iterator[DataRow]:
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


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _row(place: str, content: bytes) -> DataRow:
    try:
        values = json.loads(content, parse_float=_Number, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise UsageError(f"{place}: expected a JSON object; {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{place}: expected a JSON object, found {type(values).__name__}")
    return DataRow(place, values)


def _parquet(path: Path) -> Iterator[DataRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UsageError(f"data.path: {path}: reading parquet needs pyarrow; install the extra `runtime`") from None
    try:
        rows = parquet.ParquetFile(path).read().to_pylist()
    except (OSError, ArrowException) as error:
        raise UsageError(f"data.path: {path}: not parquet: {error}") from None
    for number, values in enumerate(rows, start=1):
        yield DataRow(f"{path}:{number}", values)
