"""Samples that wait for a replica, by batch, in the order of what they are worth."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetrl.replicas import Key

# What orders them, for a replica that holds nothing of them: whether nobody has begun the prompt, tokens that are
# lacking, False (such a replica has drawn nothing of it), the prompt, lower ones first; then the sample itself.
Waits = tuple[bool, float, bool, int, Key]


@dataclass
class Waiting:
    """A line for each batch, the most worthwhile last; what changes is moved, all else stays where it is."""

    _lines: dict[int, list[Waits]] = field(default_factory=dict)
    _of_prompt: dict[int, tuple[int, Mapping[Key, Waits]]] = field(default_factory=dict)  # its batch, what is in line

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._lines)

    def put(self, prompt: int, batch: int, waits: Iterable[Waits]) -> None:
        """Let these of a prompt wait, and nothing else of it."""
        now = {one[-1]: one for one in waits}
        _, before = self._of_prompt.pop(prompt, (batch, {}))
        if now:
            self._of_prompt[prompt] = batch, now
        gone = [one for key, one in before.items() if now.get(key) != one]
        come = [one for key, one in now.items() if before.get(key) != one]
        if not gone and not come:
            return
        line = self._lines.setdefault(batch, [])
        for one in gone:
            del line[bisect_left(line, one)]
        for one in come:
            insort(line, one)
        if not line:
            del self._lines[batch]

    def lines(self) -> Iterator[tuple[int, Sequence[Waits]]]:
        """Yield the batches of which anything waits, the lowest first, each with its line."""
        for batch in sorted(self._lines):
            yield batch, self._lines[batch]

    def of(self, prompts: set[int], batch: int) -> Iterator[Waits]:
        """Yield what waits of these prompts in a batch."""
        for prompt in prompts & self._of_prompt.keys():
            theirs, waits = self._of_prompt[prompt]
            if theirs == batch:
                yield from waits.values()


def longest(line: Sequence[Waits], most: float) -> Waits | None:
    """Return the last of a line that lacks at most so much."""
    for unknown in (True, False):
        end = bisect_right(line, (unknown, most, True))  # ahead of all that lack more, behind all that lack as much
        if end and line[end - 1][0] == unknown:
            return line[end - 1]
    return None


def alike(line: Sequence[Waits], first: Waits) -> Iterator[Waits]:
    """Yield one of a line, then those ahead of it that lack as much; of prompts that nobody has begun, it alone."""
    place = bisect_right(line, first)
    end = place - 1 if first[0] else bisect_left(line, (*first[:2], False, -math.inf))
    yield from (line[before] for before in range(place - 1, end - 1, -1))
