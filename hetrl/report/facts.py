"""What a run has said of itself so far: its summary at the end, before that its metrics and events."""

from __future__ import annotations

import datetime
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetrl.goodput import FaultCost, fault_costs, goodput
from hetrl.report.text import figure
from hetrl.workload import ITERATION

Row = Mapping[str, Any]
LAST_STEPS = 5  # the last reward is the mean over so many steps, as in summary.json
_ENDS = ("finished", "failed", "cancelled")
_BAD = ("fail", "lost", "fault", "drop", "abort", "cancel", "timeout")
_HEAD = ("time", "source", "sequence", "kind")


@dataclass(frozen=True)
class EventRow:
    """One event: seconds since the first, who, what, and what it carries."""

    seconds: float
    source: str
    kind: str
    carries: str
    bad: bool


@dataclass(frozen=True)
class Facts:
    """A run so far; what nothing told is None or empty."""

    name: str
    run: str
    phase: str  # running | finished | failed | cancelled
    cause: str
    started: str  # UTC
    elapsed_seconds: float
    steps: int
    planned_steps: int | None
    reward_first: float | None
    reward_last: float | None
    rates: Mapping[str, float]  # samples and tokens per second
    warm_start: Row | None
    versions: Sequence[Row]  # version, bytes, seconds, digest
    engines: Mapping[str, str]
    gpu_hours: Mapping[str, float]
    bytes_per_link: Mapping[str, int]
    faults_survived: int | None
    goodput: float | None  # the share of all seconds that went into the steps that count
    fault_costs: Sequence[FaultCost]


def facts(summary: Row, rows: Sequence[Row], events: Sequence[Row], held: Mapping[str, int]) -> Facts:
    """Return what is known of a run; `summary` is empty before its end, `held` are the devices of its jobs per site."""
    planned = _last(events, "planned") or {}
    end = next((event for event in events if event.get("kind") in _ENDS), {})  # the first decides, as in state.json
    times = [event["time"] for event in events if "time" in event]
    elapsed = times[-1] - times[0] if times else 0.0
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    return Facts(
        name=summary.get("name") or planned.get("name") or "a run",
        run=summary.get("run") or planned.get("run") or "",
        phase=end.get("kind", "running"),
        cause=str(end.get("cause") or ""),
        started=_utc(times[0]) if times else "",
        elapsed_seconds=elapsed,
        steps=summary.get("steps", len(rows)),
        planned_steps=planned.get("steps"),
        reward_first=summary.get("reward_first", rewards[0] if rewards else None),
        reward_last=summary.get("reward_last", statistics.fmean(rewards[-LAST_STEPS:]) if rewards else None),
        rates=_rates(summary, rows),
        warm_start=summary.get("warm_start") or _last(events, "warm_start"),
        versions=summary.get("weight_versions") or _of_kind(events, "weights_published"),
        engines=summary.get("engines") or _engines(events),
        gpu_hours=summary.get("gpu_hours") or _gpu_hours(events, held),
        bytes_per_link=summary.get("bytes_per_link") or (rows[-1].get("bytes_per_link", {}) if rows else {}),
        faults_survived=summary.get("faults_survived"),
        goodput=summary.get("goodput", _goodput(rows)),
        fault_costs=fault_costs([row for row in rows if row.get("seconds", {}).get(ITERATION) is not None]),
    )


def _goodput(rows: Sequence[Row]) -> float | None:
    """Return the seconds of all steps over those since the first start, by the last row; None where none says them."""
    elapsed = rows[-1].get("elapsed_seconds") if rows else None
    return goodput(rows, elapsed) if elapsed else None


def staleness_counts(rows: Sequence[Row]) -> Counter[int]:
    """Return the samples by how many versions behind the trainer's they were drawn, over all steps.

    A row has `versions` (weight version -> samples drawn under it) and `weight_version` (the trainer's in that step);
    a sample that was drawn under two versions counts under both.
    """
    counts: Counter[int] = Counter()
    for row in rows:
        if row.get("weight_version") is not None:
            for version, samples in row.get("versions", {}).items():
                counts[row["weight_version"] - int(version)] += samples
    return counts


def replica_rates(rows: Sequence[Row], whole_steps: bool) -> dict[str, float]:
    """Return the tokens per second of every generation replica over all steps.

    The seconds are those in which the replica generated or, where generation goes on beside the other tasks, with
    `whole_steps` those of the steps that it has samples in.
    """
    tokens: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for row in rows:
        for address, said in (row.get("replicas") or {}).items():
            spent = row.get("seconds", {}).get("iteration") if whole_steps else said.get("seconds")
            if spent and said.get("tokens") is not None:
                tokens[address] += said["tokens"]
                seconds[address] = seconds.get(address, 0.0) + spent
    return {address: tokens[address] / spent for address, spent in seconds.items()}


def event_rows(events: Sequence[Row]) -> Iterator[EventRow]:
    """Yield the events as text; a fault or an exit with an error is bad."""
    start = events[0].get("time", 0.0) if events else 0.0
    for event in events:
        kind = str(event.get("kind", ""))
        carries = ", ".join(f"{key}: {_short(value)}" for key, value in event.items() if key not in _HEAD)
        bad = any(word in kind for word in _BAD) or bool(event.get("code") and kind == "process_exited")
        yield EventRow(event.get("time", start) - start, str(event.get("source", "")), kind, carries, bad)


def _of_kind(events: Sequence[Row], kind: str) -> list[Row]:
    return [event for event in events if event.get("kind") == kind]


def _last(events: Sequence[Row], kind: str) -> Row | None:
    return next((event for event in reversed(events) if event.get("kind") == kind), None)


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _rates(summary: Row, rows: Sequence[Row]) -> dict[str, float]:
    """Return samples and tokens per second of whole iterations."""
    timed = [row for row in rows if row.get("seconds", {}).get("iteration")]
    elapsed = sum(row["seconds"]["iteration"] for row in timed)
    rates = {}
    for name in ("samples", "tokens"):
        told = summary.get(f"{name}_per_second")
        counted = sum(row.get(name, 0) for row in timed) / elapsed if elapsed else None
        if (value := told if told is not None else counted) is not None:
            rates[name] = value
    return rates


def _engines(events: Sequence[Row]) -> dict[str, str]:
    return {
        name: version
        for event in _of_kind(events, "member_ready")
        for name, version in event.get("engines", {}).items()
    }


def _gpu_hours(events: Sequence[Row], held: Mapping[str, int]) -> dict[str, float]:
    """Return the device-hours of what the jobs hold since the first one was submitted, per site."""
    submitted = next((event["time"] for event in _of_kind(events, "submitted") if "time" in event), None)
    if submitted is None:
        return {}
    seconds = max(event["time"] for event in events if "time" in event) - submitted
    return {site: count * seconds / 3600 for site, count in held.items()}


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {_short(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_short, value))
    return figure(value) if isinstance(value, float) else str(value)
