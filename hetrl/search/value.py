"""The value of a complete plan: its tasks' parts put together, with memory, links and the objective's bounds checked.

    parts of every task that is to be valued anew       `training_value`, `serving_value`
    memory of each class, links between used sites      `_excess`, `_joined`
    trainings that share directions are slowed          `_slow_down`
    weight synchronisation and the iteration            `hetrl.cost.weight_sync`, `hetrl.cost.iteration`
    what the plan is chosen for                         `objective_value`

Memory is bounded by class: a device of a class counts as holding the fullest stage that each task of its group has on
the class. So what fits here fits on every device; a plan whose tasks keep clear of each other inside a class may fit
although it does not here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hetrl.search.columns import Columns, columns_record, make_columns
from hetrl.search.encoding import Vector, views
from hetrl.search.jit import njit
from hetrl.search.objective_value import objective_value
from hetrl.search.parts import Parts, make_parts, parts_record, uses
from hetrl.search.record import record_of
from hetrl.search.serving_value import Shares, make_shares, shares_record, value_serving
from hetrl.search.sync_value import first_rollouts, sync_seconds
from hetrl.search.tables import Tables, compiled
from hetrl.search.tables_serving import BUSY, LAST, PROMPT, REFILL, WHOLE
from hetrl.search.training_value import training_seconds, value_training

VALUED = -1  # what `value` returns where it needs no row
INFEASIBLE = 1e12  # values from here on are of plans that break a bound of the objective,
UNFIT = 2 * INFEASIBLE  # from here on of plans that their devices or links do not carry
NOT_CARRIED = 100.0  # excess of a task that its devices do not carry at all


class Room(NamedTuple):
    """Workspace of the evaluation."""

    columns: Columns
    shares: Shares
    seconds: Any  # [t] of the tasks, slowed by sharing
    result: Any  # [2] the plan's value, and the seconds of an iteration


_Room = record_of(Room)


@njit
def room_record(values: Room) -> Any:
    """Return the record of these values."""
    return _Room(*values)


class Bench:
    """What plans of a problem are valued with: numbers, workspace and the parts of one plan.

    `pointers` are the three as records for compiled code; they share the arrays.
    """

    def __init__(self, tables: Tables) -> None:
        """Make room for the plans of a problem."""
        self.tables = tables
        self.room = Room(make_columns(tables), make_shares(tables), np.zeros(tables.tasks), np.zeros(2))
        self.parts = make_parts(tables)
        inner: dict[str, Any] = {
            "columns": columns_record(self.room.columns),
            "shares": shares_record(self.room.shares),
        }
        self.pointers = compiled(tables), room_record(self.room._replace(**inner)), parts_record(self.parts)


@njit
def value_task(task: int, x: Vector, tables: Tables, room: Room, parts: Parts) -> int:
    """Fill the parts of one task, and its columns or shares in the workspace.

    Return a training's number of columns; for another task `VALUED`, or the row that must be filled first.
    """
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    own = devices[group[task]]
    if tables.is_training[task]:
        return value_training(task, own, classes[task], choice[task], tables, room.columns, parts)
    return value_serving(task, own, classes[task], choice[task], tables, room.shares, parts)


@njit
def value(x: Vector, stale: Any, tables: Tables, room: Room, parts: Parts) -> int:
    """Set `room.result` to what the objective wants least and the seconds of an iteration; return `VALUED`.

    A plan that breaks a bound has the value `INFEASIBLE` and more, one that does not fit `UNFIT` and more (and infinite
    seconds): the farther from feasible the more.

    `stale` flags the tasks whose parts do not belong to the vector yet. Where a row of `ServingTables.seconds` is
    missing its index is returned instead: fill it and call again.
    """
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    for task in range(tables.tasks):
        if not stale[task]:
            continue
        row = value_task(task, x, tables, room, parts)
        if row != VALUED and not tables.is_training[task]:
            return row
        stale[task] = False
    missing = _excess(group, devices, tables, parts)
    for task in range(tables.tasks):
        missing += 0.0 if np.isfinite(parts.seconds[task]) else NOT_CARRIED
    if missing == 0.0 and not _joined(tables, parts):
        missing = NOT_CARRIED
    room.result[0], room.result[1] = UNFIT * (1 + missing), np.inf
    if missing == 0.0:
        room.seconds[:] = parts.seconds
        _slow_down(group, devices, classes, choice, tables, room, parts)
        seconds = _iteration(group, devices, classes, tables, room, parts)
        found, excess = objective_value(seconds, x, tables, parts)
        room.result[0] = found if excess == 0.0 else INFEASIBLE * (1 + excess / (1 + excess))
        room.result[1] = seconds
    return VALUED


@njit
def _excess(group: Any, devices: Any, tables: Tables, parts: Parts) -> float:
    """Return by what share device and host memory are exceeded, summed over tasks and classes; 0 where all fits."""
    excess = 0.0
    for kind in range(tables.classes):
        worst, total = 0.0, 0.0
        for g in range(tables.tasks):
            if devices[g, kind] == 0:
                continue
            resident, host = 0.0, 0.0
            for task in range(tables.tasks):
                if group[task] == g:
                    resident += parts.resident_gb[task, kind]
                    host += parts.host_gb[task, kind]
            for task in range(tables.tasks):
                if group[task] == g and parts.runs[task, kind] > 0:
                    needed = parts.peak_gb[task, kind] + resident - parts.resident_gb[task, kind]
                    excess += max(needed / tables.usable_gb[kind] - 1, 0.0)
            worst = max(worst, host)
            total += host * devices[g, kind]
        excess += max(min(worst * tables.per_node[kind], total) / tables.node_gb[kind] - 1, 0.0)
    return excess


@njit
def _joined(tables: Tables, parts: Parts) -> bool:
    """Return whether the controller's site reaches every used one, and a training's sites and weights each other."""
    lead = tables.site[parts.stage_kind[0]]
    linked = tables.network.linked
    for kind in range(tables.classes):
        site = tables.site[kind]
        for task in range(tables.tasks):
            if parts.runs[task, kind] == 0:
                continue
            if not linked[lead, site]:
                return False
            if task == tables.generation:
                for i in range(parts.stage_kind.size):
                    if parts.stage_kind[i] >= 0 and not linked[tables.site[parts.stage_kind[i]], site]:
                        return False
            for other in range(kind):
                if tables.is_training[task] and parts.runs[task, other] > 0 and not linked[tables.site[other], site]:
                    return False
    return True


@njit
def _slow_down(group: Any, devices: Any, classes: Any, choice: Any, tables: Tables, room: Room, parts: Parts) -> None:
    """Value trainings of different groups anew that use the same directions between sites: each gets half of a link."""
    for task in range(tables.tasks):
        for other in range(tables.tasks):
            if not (tables.is_training[task] and tables.is_training[other]) or group[task] == group[other]:
                continue
            meet = False
            for d in range(parts.links[task]):
                meet = meet or uses(other, parts.direction[task, d], parts)
            if meet:
                own = devices[group[task]]
                found = value_training(task, own, classes[task], choice[task], tables, room.columns, parts)
                room.seconds[task] = training_seconds(
                    task, found, choice[task], tables, room.columns, parts, other, False
                )


@njit
def _iteration(group: Any, devices: Any, classes: Any, tables: Tables, room: Room, parts: Parts) -> float:
    """Return the seconds between two weight versions: `hetrl.cost.iteration.iteration_seconds`."""
    transfer, pause = sync_seconds(group, devices, classes, tables, parts)
    generation = room.seconds[tables.generation] + parts.switch_seconds[tables.generation]
    inferences, trainings, busiest, own_inferences, own_trainings = 0.0, 0.0, 0.0, 0.0, 0.0
    for g in range(tables.tasks):
        inference, training = 0.0, 0.0
        for task in range(tables.tasks):
            if group[task] == g and tables.is_training[task]:
                training += room.seconds[task] + parts.switch_seconds[task]
            elif group[task] == g and tables.is_inference[task]:
                inference += room.seconds[task] + parts.switch_seconds[task]
        inferences, trainings = max(inferences, inference), max(trainings, training)
        if g == group[tables.generation]:
            own_inferences, own_trainings = inference, training
        busiest = max(busiest, inference + training)
    if tables.staleness == 0:
        return float(generation + inferences + trainings + transfer + pause)
    stops = int(own_inferences > 0) + int(own_trainings > 0)
    if stops == 2 and own_inferences == inferences:
        stops = 1
    stopped = own_inferences + own_trainings + pause + stops * parts.rollouts[REFILL]
    rest = inferences - own_inferences + trainings - own_trainings + transfer
    links = _busiest_link(tables, parts)
    least = max(generation + stopped, transfer, links, busiest, generation + own_inferences + own_trainings)
    return float(max(least, _admitted(stopped, rest, tables, parts)))


@njit
def _admitted(stopped: float, rest: float, tables: Tables, parts: Parts) -> float:
    """Return the period that the rule of admission sustains: `hetrl.cost.admission.period_seconds`."""
    ways, rollouts = 1.0 + tables.staleness, parts.rollouts
    waiting = (1 - tables.samples_per_prompt / tables.training.samples) / 2
    running = min(
        _least_running(ways, rollouts[LAST], stopped, rest),
        _least_running(ways - waiting, rollouts[PROMPT], stopped, rest),
        max(_least_running(ways, rollouts[WHOLE], stopped, rest), rollouts[WHOLE]),
    )
    return float(stopped + max(running, rollouts[BUSY]))


@njit
def _least_running(ways: float, needed: float, stopped: float, rest: float) -> float:
    """Return the least time of generation: `hetrl.cost.admission._least_running`."""
    linear = ways * stopped - rest - needed
    return (math.sqrt(linear * linear + 4 * ways * needed * stopped) - linear) / (2 * ways)


@njit
def _busiest_link(tables: Tables, parts: Parts) -> float:
    """Return the time of all that crosses the busiest link in an iteration, in one direction: trainings and weights."""
    load = np.zeros(tables.sites * tables.sites)
    site, rollouts = tables.site, parts.runs[tables.generation]
    for task in range(tables.tasks):
        for d in range(parts.links[task]):
            load[parts.direction[task, d]] += parts.direction_bytes[task, d]
    for i in range(parts.stage_kind.size):
        if parts.site_bytes[i] == 0:
            continue
        source = site[parts.stage_kind[i]]
        for kind in range(site.size):
            if site[kind] != source and first_rollouts(kind, rollouts, site):
                load[source * tables.sites + site[kind]] += parts.site_bytes[i]
    return float((load * tables.network.link_byte.ravel()).max())
