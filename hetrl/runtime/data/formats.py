"""What a row of each data set holds, and how its answer is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hetrl.errors import UsageError
from hetrl.runtime.data.math_answer import last_boxed, marked


@dataclass(frozen=True)
class Row:
    """One row of a file and where it stands, `FILE:LINE` counted from 1."""

    place: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """Of a data set: the key of the question, its reader of answers, and the folders that a directory keeps files in.

    `folders` are globs that end in `/`, the directory itself being the empty one; `needs` completes "data.path: ...".
    """

    question: str
    answer: Callable[[Row], str]
    folders: tuple[str, ...]
    needs: str


def question_and_answer(kind: str, row: Row) -> tuple[str, str]:
    """Return both texts of a row; raises UsageError with its place where one is missing."""
    form = FORMATS[kind]
    return _text(row, form.question), form.answer(row)


def _text(row: Row, key: str) -> str:
    value = row.values.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f'{row.place}: expected a text under "{key}"; its keys are: {_keys(row)}')
    return value


def _keys(row: Row) -> str:
    return ", ".join(row.values) or "none"


def _plain(row: Row) -> str:
    value = row.values.get("answer")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return _text(row, "answer")


def _gsm8k(row: Row) -> str:
    """Return what follows `####`, without thousands separators (Cobbe et al. 2021, arXiv 2110.14168)."""
    answer = marked(_text(row, "answer"))
    if answer is None:
        raise UsageError(f'{row.place}: "answer" has no "#### " with the final answer behind it')
    return answer.replace(",", "")


def _math(row: Row) -> str:
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
