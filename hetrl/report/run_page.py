"""A run as one HTML page that needs nothing else: curves, an iteration over time, devices, weights, links, events."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetrl.plan.plan import Plan
from hetrl.report.chart import Chart, histogram, line_chart
from hetrl.report.device_map import device_map, sites_of
from hetrl.report.facts import LAST_STEPS, Facts, Row, event_rows, facts, replica_rates, staleness_counts
from hetrl.report.gantt import gantt, group_waits, is_asynchronous
from hetrl.report.page import SHORT, Bar, bars, mark_of_task, marks, render
from hetrl.report.rows import servers, task_rows
from hetrl.report.text import byte_figure, compact_devices, figure, spoken

# key of a row -> title
_CURVES = {
    "reward": "Reward",
    "loss": "Loss",
    "kl": "KL divergence",
    "clip_fraction": "Clipped fraction",
    "entropy": "Entropy",
    "grad_norm": "Gradient norm",
    "mismatch": "Rollout log-prob mismatch",
    "weights_changed": "Share of weights that changed",
}
_LOGARITHMIC = ("mismatch",)
_SHOWN_ELSEWHERE = (
    *("step", "samples", "tokens", "weight_version", "weight_bytes", "weight_full_bytes"),
    *("time", "elapsed_seconds"),
)
_MOST_ROWS = 200  # of tables that grow with the run
_SHOWN_STEPS = 12  # whose samples are shown


@dataclass(frozen=True)
class TaskSeconds:
    """Seconds of a task in an iteration: predicted, and measured as the median over the steps."""

    name: str
    where: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        """Return measured over predicted."""
        return self.measured / self.predicted if self.predicted and self.measured is not None else None


def run_page(
    summary: Row,
    metrics: Sequence[Row],
    events: Sequence[Row],
    plan: Plan,
    gpus: Mapping[str, str] | None = None,
    held: Mapping[str, int] | None = None,
    samples: Sequence[Row] = (),
) -> str:
    """Return the page; `summary` is empty before the end, what it would say is then taken from metrics and events.

    `gpus` (device -> catalogue GPU) are all devices of the topology; without it the map has those of the plan only.
    `held` (site -> devices that the jobs hold) gives the GPU-hours before the end. `samples` are texts with rewards.
    """
    rows = [row for row in metrics if "step" in row]
    own = _behind_resumption(rows, events)
    told = [event for event in event_rows(events) if event.kind != "step"]
    known = facts(summary, rows, events, held or {})
    return render(
        "run.html.j2",
        plan=plan,
        facts=known,
        last_steps=min(LAST_STEPS, known.steps),
        charts=_curves(rows) + _warm_start_curve(events),
        speeds=_speeds(rows),
        more_charts=_other_curves(rows),
        staleness=histogram("Staleness of the samples", staleness_counts(rows), "versions behind the trainer"),
        samples=_newest_of_some_steps(samples),
        asynchronous=is_asynchronous(plan),
        replicas=_replica_bars(own, is_asynchronous(plan)),
        gantt=gantt(plan, own),
        seconds=_seconds(summary, own, plan),
        waits=group_waits(own, plan),
        used=len(plan.devices),
        marks=marks(plan),
        mark_of_task=mark_of_task(plan),
        short=SHORT,
        sites=device_map(plan, gpus or {}),
        rows=task_rows(plan),
        compact_devices=compact_devices,
        servers=servers,
        links=bars((name, count, byte_figure(count)) for name, count in known.bytes_per_link.items()),
        version_charts=_version_charts(known),
        version_bytes=sum(entry.get("bytes", 0) for entry in known.versions),
        versions=known.versions[-_MOST_ROWS:],
        faults=[event for event in told if event.bad],
        events=told[-_MOST_ROWS:],
        left_out=max(0, len(told) - _MOST_ROWS),
    )


def _behind_resumption(rows: Sequence[Row], events: Sequence[Row]) -> Sequence[Row]:
    """Return the rows of this run alone: those of the one that it goes on from may be of another plan."""
    resumed = next((event for event in reversed(events) if event.get("kind") == "resumed"), {})
    return rows[resumed.get("rows", 0) :]


def _newest_of_some_steps(samples: Sequence[Row]) -> list[Row]:
    """Return the samples of the first step, of the last and of some in between, evenly, the last first."""
    steps = sorted({row["step"] for row in samples})
    shown = {steps[(len(steps) - 1) * place // (_SHOWN_STEPS - 1)] for place in range(_SHOWN_STEPS)} if steps else set()
    return sorted((row for row in samples if row["step"] in shown), key=lambda row: -int(row["step"]))


def _curves(rows: Sequence[Row]) -> list[Chart]:
    """Return the curves that every run should have, with or without values; none before the first step."""
    return [_curve(key, title, rows) for key, title in _CURVES.items()] if rows else []


def _curve(key: str, title: str, rows: Sequence[Row]) -> Chart:
    points = _points(rows, key)
    log = key in _LOGARITHMIC and any(y is not None and y > 0 for _, y in points)
    return line_chart(f"{title} (log scale)" if log else title, points, log=log)


def _warm_start_curve(events: Sequence[Row]) -> list[Chart]:
    """Return the sampled reward over the supervised steps before reinforcement learning."""
    points = [(event["steps"], event["reward"]) for event in events if event.get("kind") == "warm_start"]
    return [line_chart("Reward in the warm start", points, "supervised step")] if len(points) > 1 else []


def _speeds(rows: Sequence[Row]) -> list[Chart]:
    """Return seconds per step and tokens per second."""
    iteration = [(row["step"], row.get("seconds", {}).get("iteration")) for row in rows]
    tokens = [
        (row["step"], row["tokens"] / seconds if seconds and "tokens" in row else None)
        for row, (_, seconds) in zip(rows, iteration, strict=True)
    ]
    charts = [line_chart("Seconds per step", iteration), line_chart("Tokens per second, whole steps", tokens)]
    return [chart for chart in charts if chart.y_ticks]


def _other_curves(rows: Sequence[Row]) -> list[Chart]:
    """Return the curve of every other number of the rows."""
    numbers = dict.fromkeys(
        key
        for row in rows
        for key, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
    keys = [key for key in numbers if key not in _CURVES and key not in _SHOWN_ELSEWHERE]
    charts = [line_chart(spoken(key).capitalize(), _points(rows, key)) for key in keys]
    return [chart for chart in charts if chart.y_ticks]


def _points(rows: Sequence[Row], key: str) -> list[tuple[float, float | None]]:
    return [(row["step"], row.get(key)) for row in rows]


def _replica_bars(rows: Sequence[Row], asynchronous: bool) -> list[Bar]:
    rates = replica_rates(rows, whole_steps=asynchronous)
    return bars((address, rate, f"{figure(rate)} tokens/s") for address, rate in rates.items())


def _version_charts(known: Facts) -> list[Chart]:
    """Return bytes and seconds of every weight version."""
    megabytes = [(entry["version"], entry["bytes"] / 1e6 if "bytes" in entry else None) for entry in known.versions]
    seconds = [(entry["version"], entry.get("seconds")) for entry in known.versions]
    charts = [line_chart("Megabytes of each weight version", megabytes, "version")]
    charts += [line_chart("Seconds until it was served everywhere", seconds, "version")]
    return [chart for chart in charts if chart.y_ticks]


def _seconds(summary: Row, rows: Sequence[Row], plan: Plan) -> list[TaskSeconds]:
    where = sites_of(plan, plan.tasks)
    if tasks := summary.get("tasks"):
        pairs = {name: (both.get("predicted_seconds"), both.get("measured_seconds")) for name, both in tasks.items()}
    else:
        predicted = {**plan.predicted.tasks, "iteration": plan.predicted.iteration_seconds}
        pairs = {name: (value, _median(rows, name)) for name, value in predicted.items()}
    return [TaskSeconds(spoken(name), where.get(name, ""), *pair) for name, pair in pairs.items()]


def _median(rows: Sequence[Row], task: str) -> float | None:
    found = [row["seconds"][task] for row in rows if task in row.get("seconds", {})]
    return statistics.median(found) if found else None
