"""When tasks are at work, on this process's clock, and what a group of devices waits for meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hetrl.workload import ACTOR_TRAINING, OLD_LOGPROBS

CONTROLLER = "controller"  # what is waited for when no other task is at work: rewards by rule, batches, files
_AT_ONCE_SECONDS = 0.001

# on whose devices work is done that is not a task of a plan
_OWNERS = {OLD_LOGPROBS: ACTOR_TRAINING}


@dataclass(frozen=True)
class Span:
    """A task is at work from `start` to `end`, in seconds."""

    task: str
    start: float
    end: float

    @property
    def owner(self) -> str:
        """Return the task of the plan on whose devices that is."""
        return _OWNERS.get(self.task, self.task)


class Timeline:
    """Notes when tasks are at work; what of a task overlaps is one span."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._since: dict[str, float] = {}
        self._depth: Counter[str] = Counter()

    @contextmanager
    def of(self, task: str) -> Iterator[None]:
        """Note that a task is at work in the body."""
        if not self._depth[task]:
            self._since[task] = time.monotonic()
        self._depth[task] += 1
        try:
            yield
        finally:
            self._depth[task] -= 1
            if not self._depth[task]:
                self._spans.append(Span(task, self._since.pop(task), time.monotonic()))

    @contextmanager
    def timed(self, seconds: dict[str, float], task: str) -> Iterator[None]:
        """Note that a task is at work in the body, and how long it took if it succeeds."""
        start = time.monotonic()
        with self.of(task):
            yield
        seconds[task] = time.monotonic() - start

    def between(self, start: float, end: float) -> tuple[Span, ...]:
        """Return who was at work from start to end, in seconds after `start`; what was before is forgotten."""
        self._spans = [span for span in self._spans if span.end > start]
        spans = [*self._spans, *(Span(task, since, end) for task, since in self._since.items())]
        inside = (Span(one.task, max(one.start, start) - start, min(one.end, end) - start) for one in spans)
        return _joined(sorted((one for one in inside if one.end > one.start), key=lambda one: (one.start, one.end)))


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return spans, those of a task as one that follow each other at once, as a turn and the work of it."""
    found: list[Span] = []
    last: dict[str, int] = {}
    for span in spans:
        at = last.get(span.task)
        if at is not None and span.start - found[at].end < _AT_ONCE_SECONDS:
            found[at] = Span(span.task, found[at].start, max(found[at].end, span.end))
        else:
            last[span.task] = len(found)
            found.append(span)
    return tuple(found)


def waits(spans: Sequence[Span], tasks: Collection[str], end: float) -> dict[str, float]:
    """Return the seconds from 0 to `end` in which no task of a group was at work, by what it waited for.

    That is, going back from the group's next work, the other task that was at work last.
    """
    found: dict[str, float] = {}
    others = [span for span in spans if span.owner not in tasks]
    for first, last in _gaps([span for span in spans if span.owner in tasks], end):
        at = last
        while at > first:
            one = max((o for o in others if o.start < at and o.end > first), key=lambda o: min(o.end, at), default=None)
            nobody = at - (first if one is None else min(one.end, at))
            found[CONTROLLER] = found.get(CONTROLLER, 0.0) + nobody
            at -= nobody
            if one is not None:
                found[one.task] = found.get(one.task, 0.0) + at - max(one.start, first)
                at = max(one.start, first)
    return {task: seconds for task, seconds in found.items() if seconds > 0}


def _gaps(spans: Sequence[Span], end: float) -> Iterator[tuple[float, float]]:
    """Yield the times from 0 to `end` that no span covers."""
    at = 0.0
    for span in sorted(spans, key=lambda one: one.start):
        if span.start > at:
            yield at, span.start
        at = max(at, span.end)
    if at < end:
        yield at, end
