"""Prompts and their answers: generated tasks, and files of questions in an order that a seed gives.

A source is a pure function of (seed, index), so that a resumed run sees the same prompts in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hetrl.describe.experiment import Data
from hetrl.errors import UsageError
from hetrl.runtime.data.files import FORMATS, files_of, question_and_answer, rows_of


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


def shuffled(prompts: Sequence[Prompt], seed: int) -> Source:
    """Return the prompts in an order that the seed gives; each pass over them has another one."""

    def prompt(index: int) -> Prompt:
        epoch, place = divmod(index, len(prompts))
        return prompts[_order(seed, epoch, len(prompts))[place]]

    return prompt


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> Sequence[int]:
    order = list(range(length))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def read_prompts(kind: str, path: Path, split: str) -> tuple[Prompt, ...]:
    """Read every prompt of a data set, in the order of its files.

    Raises UsageError with file and line of a row that is not as the format says, and where there are no rows.
    """
    prompts = [Prompt(*question_and_answer(kind, row)) for file in files_of(path, kind, split) for row in rows_of(file)]
    if not prompts:
        raise UsageError(f"data.path: {path} has no rows")
    return tuple(prompts)


@dataclass(frozen=True)
class Opened:
    """A source; of a file's `prompts` (0: they are generated) so many `left_out` were too long."""

    source: Source
    prompts: int = 0
    left_out: int = 0


def open_source(data: Data, fits: Callable[[Prompt], bool] = lambda prompt: True) -> Opened:
    """Return the source that an experiment names, without the prompts of files that do not fit.

    Raises UsageError where it cannot be read, and where no prompt fits.
    """
    if data.kind == "larger-digit":
        return Opened(larger_digit(data.seed))
    if data.kind == "arithmetic":
        return Opened(arithmetic(data.seed))
    if data.path is None:
        raise UsageError(f"data.path: kind {data.kind} needs {FORMATS[data.kind].needs}")
    prompts = read_prompts(data.kind, Path(data.path), data.split)
    kept = tuple(filter(fits, prompts))
    if not kept:
        raise UsageError(f"data.path: all {len(prompts)} prompts of {data.path} are longer than batch.prompt_tokens")
    return Opened(shuffled(kept, data.seed), len(prompts), len(prompts) - len(kept))
