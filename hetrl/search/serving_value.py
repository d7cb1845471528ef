"""Seconds and memory of generation and of the inferences: replicas per class, the work shared out by their rates.

A class runs equal replicas of its option, as many as fit whole nodes and the remainder; `ServingTables.seconds` has the
time of one of them for every number of units of work. Replicas that get no work are left out of the plan.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.search.encoding import CACHE, IDLE, RESIDENT
from hetrl.search.jit import njit
from hetrl.search.parts import Parts, clear_task, hold
from hetrl.search.record import record_of
from hetrl.search.tables import Tables
from hetrl.search.tables_serving import BUSY, ENDS, REFILL, WHOLE

Ints = npt.NDArray[np.int64]
BISECTIONS = 24


class Shares(NamedTuple):
    """How the work of one serving task is shared out; by class."""

    replicas: Ints  # that fit
    units: Ints  # of each replica but the first `extra`
    extra: Ints  # replicas with one unit more
    row: Ints


_Shares = record_of(Shares)


@njit
def shares_record(values: Shares) -> Any:
    """Return the record of these values."""
    return _Shares(*values)


def make_shares(tables: Tables) -> Shares:
    """Return room for the shares of any serving task."""
    return Shares(*np.zeros((4, tables.classes), np.int64))


@njit
def replicas_of(task: int, kind: int, option: int, devices: int, tables: Tables) -> int:
    """Return how many replicas of an option fit on so many devices of a class."""
    size, nodes = tables.per_node[kind], tables.serving.nodes[task, kind, option]
    if nodes > 1:
        return int(devices // size // nodes)
    needed = tables.serving.tensor[task, kind, option] * tables.serving.pipeline[task, kind, option]
    return int((devices // size) * (size // needed) + devices % size // needed)


@njit
def value_serving(
    task: int, devices: Any, options: Any, choice: Any, tables: Tables, shares: Shares, parts: Parts
) -> int:
    """Fill a serving task's parts; return -1, or the row of seconds that must be filled first."""
    clear_task(task, parts)
    serving, count = tables.serving, 0
    cache = choice[CACHE] if task == tables.generation else 0
    for kind in range(tables.classes):
        shares.replicas[kind] = shares.units[kind] = shares.extra[kind] = 0
        option = options[kind]
        if option == 0 or devices[kind] == 0:
            continue
        if not math.isfinite(serving.peak_gb[task, kind, option, cache, choice[IDLE]]):
            continue
        shares.replicas[kind] = replicas_of(task, kind, option, devices[kind], tables)
        shares.row[kind] = serving.row[task, kind, option, cache]
        if shares.replicas[kind] and not serving.ready[shares.row[kind]]:
            return int(shares.row[kind])
        count += shares.replicas[kind]
    if count > 0:
        _share(task, tables, shares)
        _note(task, options, choice, cache, tables, shares, parts)
    return -1


@njit
def _share(task: int, tables: Tables, shares: Shares) -> None:
    """Find the earliest end by which all units can be done; take back what is too much where it ends last."""
    seconds, units = tables.serving.seconds, tables.serving.units[task]
    low, high = 0.0, np.inf
    for kind in range(tables.classes):
        if shares.replicas[kind]:
            high = min(high, seconds[shares.row[kind], -(-units // shares.replicas[kind]), ENDS])
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _done(middle, units, tables, shares) >= units:
            high = middle
        else:
            low = middle
    surplus = _done(high, units, tables, shares) - units
    while surplus > 0:
        latest, last = -1, 0.0
        for kind in range(tables.classes):
            most = shares.units[kind] + (1 if shares.extra[kind] else 0)
            if shares.replicas[kind] and most > 0 and seconds[shares.row[kind], most, ENDS] >= last:
                latest, last = kind, seconds[shares.row[kind], most, ENDS]
        if shares.extra[latest] == 0:
            shares.extra[latest] = shares.replicas[latest]
            shares.units[latest] -= 1
        taken = min(surplus, shares.extra[latest])
        shares.extra[latest] -= taken
        surplus -= taken


@njit
def _done(end: float, units: int, tables: Tables, shares: Shares) -> int:
    """Set the units that a replica of each class does by `end`, and return the sum over all replicas."""
    total, seconds, replicas, rows = 0, tables.serving.seconds, shares.replicas, shares.row
    for kind in range(replicas.size):
        if replicas[kind] == 0:
            continue
        row = seconds[rows[kind]]
        low, high = 0, units
        while low < high:
            middle = (low + high + 1) // 2
            if row[middle, ENDS] <= end:
                low = middle
            else:
                high = middle - 1
        shares.units[kind], shares.extra[kind] = low, 0
        total += low * replicas[kind]
    return total


@njit
def running(kind: int, shares: Shares) -> int:
    """Return how many replicas of a class have work."""
    return int(shares.replicas[kind] if shares.units[kind] > 0 else shares.extra[kind])


@njit
def _note(task: int, options: Any, choice: Any, cache: int, tables: Tables, shares: Shares, parts: Parts) -> None:
    """Set seconds, switch and memory of the task from its shares."""
    serving, idle = tables.serving, choice[IDLE]
    count = 0
    for kind in range(tables.classes):
        parts.runs[task, kind] = running(kind, shares)
        count += parts.runs[task, kind]
    whole, rate = 0.0, 0.0
    if task == tables.generation:
        parts.rollouts[:] = 0.0
    for kind in range(tables.classes):
        if parts.runs[task, kind] == 0:
            continue
        option, row = options[kind], serving.seconds[shares.row[kind]]
        at = (task, kind, option, cache, idle)
        hold(task, kind, serving.resident_gb[at], serving.peak_gb[at], serving.host_gb[at], parts)
        parts.switch_seconds[task] = max(parts.switch_seconds[task], serving.switch_seconds[at])
        for more in range(2):
            units = shares.units[kind] + more
            replicas = shares.extra[kind] if more else shares.replicas[kind] - shares.extra[kind]
            if units == 0 or replicas == 0:
                continue
            slowest = 1.0
            if task != tables.generation:
                samples = units * serving.unit_samples[task]
                slowest += tables.training.largest[count] * tables.training.variation / math.sqrt(samples)
            whole = max(whole, row[units, WHOLE] * slowest)
            if task == tables.generation:
                parts.rollouts[:] = np.maximum(parts.rollouts, row[units, :ENDS])
            rate += replicas * units / row[units, BUSY]
    parts.seconds[task] = whole
    if task == tables.generation and tables.staleness > 0:
        parts.seconds[task] = parts.rollouts[BUSY] = serving.units[task] / rate
    if task == tables.generation and idle == RESIDENT:
        parts.rollouts[REFILL] = 0.0
