"""One iteration as bars over time, predicted above measured: pure arithmetic, a template draws it as SVG.

predicted, sync    generation, then the inferences, then the trainings;
                   in a phase groups run beside each other, the tasks of one group one after the other
predicted, async   every group from the start, its tasks one after the other
weights            behind the training of their model
old log-probs      where the actor's trainer scores the batch; what is left of its training is drawn as that
measured           who was at work when, from when the trainer was ready for a batch until its weights were served; what
                   runs for the next batch is in it
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetrl.cost.iteration import SYNCS
from hetrl.plan.plan import Plan
from hetrl.report.chart import nice_ticks, tick_label
from hetrl.report.device_map import sites_of
from hetrl.report.facts import Row
from hetrl.report.text import figure, spoken
from hetrl.workload import (
    ACTOR_GENERATION,
    ACTOR_TRAINING,
    CRITIC_TRAINING,
    CRITIC_WEIGHT_SYNC,
    INFERENCES,
    ITERATION,
    OLD_LOGPROBS,
    TRAININGS,
    WEIGHT_SYNC,
)

MOST_REPLICAS = 12
_SCORES = (*INFERENCES, OLD_LOGPROBS)
_ORDER = (ACTOR_GENERATION, *_SCORES, *TRAININGS)
_SENT_BEHIND = {WEIGHT_SYNC: ACTOR_TRAINING, CRITIC_WEIGHT_SYNC: CRITIC_TRAINING}


@dataclass(frozen=True)
class Span:
    """From `start` to `end`, in seconds since the iteration began."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.end - self.start


@dataclass(frozen=True)
class GanttRow:
    """A task, a replica of generation or the whole iteration; what is not predicted is None, not measured empty."""

    name: str
    where: str
    predicted: Span | None
    measured: tuple[Span, ...]
    replica: bool = False

    @property
    def measured_seconds(self) -> float | None:
        """Return how long it was at work."""
        return sum(span.seconds for span in self.measured) if self.measured else None

    @property
    def summary(self) -> str:
        """Return the row as a sentence."""
        spans = (*(("predicted", s) for s in (self.predicted,) if s), *(("measured", s) for s in self.measured))
        said = [f"{how} from {figure(s.start)} to {figure(s.end)} s" for how, s in spans]
        return f"{self.name}{f' at {self.where}' if self.where else ''}: {', '.join(said)}"


@dataclass(frozen=True)
class Gantt:
    """The rows of one iteration; `step` is the step that was measured, `end_seconds` the right edge of the axis."""

    step: int | None
    rows: tuple[GanttRow, ...]
    ticks: tuple[tuple[float, str], ...]  # per cent of the width, label
    end_seconds: float
    replicas_left_out: int = 0

    def per_cent(self, seconds: float) -> float:
        """Return a position or a length in per cent of the width."""
        return round(100 * seconds / self.end_seconds, 4)


def gantt(plan: Plan, rows: Sequence[Row]) -> Gantt:
    """Return the chart of the step whose iteration took the median time; without steps, of the prediction alone."""
    row = typical_step(rows)
    predicted = predicted_spans(plan)
    measured = measured_spans(row) if row else {}
    names = [name for name in _ordered({**predicted, **measured}) if name != ITERATION]
    where = sites_of(plan, names)
    drawn, left_out = [], 0
    for name in (*names, ITERATION):
        drawn.append(GanttRow(spoken(name), where.get(name, ""), predicted.get(name), measured.get(name, ())))
        if name == ACTOR_GENERATION and row and name in measured:
            replicas = _replica_rows(row.get("replicas") or {}, measured[name][0].start)
            drawn += replicas[:MOST_REPLICAS]
            left_out = max(0, len(replicas) - MOST_REPLICAS)
    end = max((span.end for r in drawn for span in (r.predicted, *r.measured) if span is not None), default=0.0)
    marks = nice_ticks(0.0, end, 6)
    ticks = tuple((round(100 * mark / marks[-1], 4), tick_label(mark, marks)) for mark in marks)
    return Gantt(row["step"] if row else None, tuple(drawn), ticks, marks[-1], left_out)


def is_asynchronous(plan: Plan) -> bool:
    """Return whether generation goes on while the trainer learns."""
    return plan.algorithm.mode == "async" and plan.algorithm.max_staleness > 0


def typical_step(rows: Sequence[Row]) -> Row | None:
    """Return the first row whose iteration took the (lower) median of the seconds."""
    timed = [row for row in rows if ITERATION in row.get("seconds", {})]
    if not timed:
        return None
    median = statistics.median_low(row["seconds"][ITERATION] for row in timed)
    return next(row for row in timed if row["seconds"][ITERATION] == median)


def predicted_spans(plan: Plan) -> dict[str, Span]:
    """Return when each task runs, put together as the model of the iteration does (`hetrl/cost/iteration.py`)."""
    seconds, total = dict(plan.predicted.tasks), plan.predicted.iteration_seconds
    if ACTOR_TRAINING in seconds:
        seconds[ACTOR_TRAINING] -= seconds.get(OLD_LOGPROBS, 0.0)
    phases: tuple[tuple[str, ...], ...] = ((ACTOR_GENERATION,), _SCORES, TRAININGS)
    if is_asynchronous(plan):
        phases = (_ORDER,)
    spans, start = dict[str, Span](), 0.0
    for phase in phases:
        for group in plan.groups:
            own = {*group.tasks, *((OLD_LOGPROBS,) if ACTOR_TRAINING in group.tasks else ())}
            spans |= _one_after_the_other(start, [(n, seconds[n]) for n in phase if n in own and n in seconds])
        start = max((span.end for span in spans.values()), default=0.0)
    for sync, training in _SENT_BEHIND.items():
        if sync in seconds and training in spans:
            spans[sync] = Span(spans[training].end, spans[training].end + seconds[sync])
    return {**spans, ITERATION: Span(0.0, total)}


def measured_spans(row: Row) -> dict[str, tuple[Span, ...]]:
    """Return when each task was at work during a step."""
    found: dict[str, tuple[Span, ...]] = {}
    for task, start, end in row.get("spans", ()):
        found[task] = (*found.get(task, ()), Span(start, end))
    return {**found, ITERATION: (Span(0.0, row["seconds"][ITERATION]),)}


@dataclass(frozen=True)
class GroupWaits:
    """How long the devices of a group were idle in an iteration, of what share of it, and what for."""

    tasks: str
    devices: int
    seconds: float
    share: float
    reasons: str


def group_waits(rows: Sequence[Row], plan: Plan) -> list[GroupWaits]:
    """Return the waits of every group of the plan: the medians over the steps; none before the first step.

    Rows of another number of groups are of another plan, and left out.
    """
    timed = [row for row in rows if len(row.get("waits", ())) == len(plan.groups)]
    if not timed:
        return []
    iteration = statistics.median(row["seconds"][ITERATION] for row in timed)
    found = []
    for number, group in enumerate(plan.groups):
        waits = [row["waits"][number] for row in timed]
        names = dict.fromkeys(name for one in waits for name in one)
        reasons = {name: statistics.median(one.get(name, 0.0) for one in waits) for name in names}
        said = [
            f"{spoken(name)} {figure(seconds)} s"
            for name, seconds in sorted(reasons.items(), key=lambda pair: -pair[1])
            if seconds >= iteration / 100
        ]
        seconds = statistics.median(sum(one.values()) for one in waits)
        tasks = ", ".join(spoken(name) for name in _ordered(group.tasks))
        found.append(GroupWaits(tasks, len(group.devices), seconds, seconds / iteration, ", ".join(said) or "–"))
    return found


def _one_after_the_other(start: float, tasks: Iterable[tuple[str, float]]) -> dict[str, Span]:
    spans = {}
    for name, seconds in tasks:
        spans[name] = Span(start, start + seconds)
        start += seconds
    return spans


def _ordered(names: Iterable[str]) -> Iterator[str]:
    """Yield the names in the order of the dataflow, unknown ones before those of weights that travel."""
    left, last = list(names), [*SYNCS.values()]
    yield from (name for name in _ORDER if name in left)
    yield from (name for name in left if name not in (*_ORDER, *last))
    yield from (name for name in left if name in last)


def _replica_rows(replicas: Mapping[str, Row], start: float) -> list[GanttRow]:
    """Return a row per generation replica (`site/task/number`), the slowest first where not all will be drawn."""
    timed = [(address, said["seconds"]) for address, said in replicas.items() if said.get("seconds") is not None]
    if len(timed) > MOST_REPLICAS:
        timed.sort(key=lambda pair: -pair[1])
    return [
        GanttRow(f"replica {number}", site, None, (Span(start, start + seconds),), replica=True)
        for (site, _, number), seconds in ((address.split("/"), seconds) for address, seconds in timed)
    ]
