"""Prompts and their answers: generated tasks and files of JSON lines.

A source is a pure function of (seed, index), so that a resumed run sees the same prompts in the same order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hetrl.config import Data
from hetrl.errors import UsageError


@dataclass(frozen=True)
class Prompt:
    """A question and the answer that the rule accepts."""

    text: str
    answer: str


Source = Callable[[int], Prompt]


def larger_digit(seed: int) -> Source:
    """Return prompts such as `3 7>` whose answer is the larger of two different digits."""

    def prompt(index: int) -> Prompt:
        first, second = random.Random(f"{seed}:{index}").sample(range(10), 2)
        return Prompt(f"{first} {second}>", str(max(first, second)))

    return prompt


def arithmetic(seed: int) -> Source:
    """Return prompts such as `38+54=` with two two-digit numbers; the answer is their sum."""

    def prompt(index: int) -> Prompt:
        generator = random.Random(f"{seed}:{index}")
        first, second = generator.randrange(10, 100), generator.randrange(10, 100)
        return Prompt(f"{first}+{second}=", str(first + second))

    return prompt


def json_lines(path: Path, seed: int) -> Source:
    """Return the rows of a file of {"prompt": .., "answer": ..}, shuffled anew in each pass over the file."""
    rows = _read_rows(path)

    def prompt(index: int) -> Prompt:
        epoch, place = divmod(index, len(rows))
        return rows[_order(seed, epoch, len(rows))[place]]

    return prompt


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, length: int) -> Sequence[int]:
    order = list(range(length))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _read_rows(path: Path) -> list[Prompt]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"data.path: {path}: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows.append(Prompt(str(row["prompt"]), str(row["answer"])))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UsageError(f'{path}:{number}: expected a JSON object with "prompt" and "answer"') from None
    if not rows:
        raise UsageError(f"data.path: {path} has no rows")
    return rows


def open_source(data: Data) -> Source:
    """Return the source that an experiment names; raises UsageError where it cannot be read."""
    if data.kind == "larger-digit":
        return larger_digit(data.seed)
    if data.kind == "arithmetic":
        return arithmetic(data.seed)
    if data.kind == "jsonl":
        if data.path is None:
            raise UsageError("data.path: kind jsonl needs the path of a file of JSON lines")
        return json_lines(Path(data.path), data.seed)
    raise UsageError(
        f'data.kind: "{data.kind}" can be planned for but not read yet; use jsonl, arithmetic, larger-digit'
    )
