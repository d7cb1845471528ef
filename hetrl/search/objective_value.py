"""The objective of a plan from the seconds of its iteration: `hetrl.search.objective`, summed up by classes.

A task uses the devices of its group from the first on, in units: the ranks of a stage (training), a replica. So what it
uses of a class is a prefix of the nodes, and of each node, and the group's part of a node is its greediest task's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hetrl.cost.iteration import HOUR
from hetrl.search.encoding import TENSOR, Vector, views
from hetrl.search.jit import njit
from hetrl.search.objective import COST, KINDS, ROUNDING, THROUGHPUT, TIE
from hetrl.search.parts import Parts
from hetrl.search.sync_value import remainder_node
from hetrl.search.tables import Tables

_THROUGHPUT, _COST = KINDS.index(THROUGHPUT), KINDS.index(COST)


@njit
def objective_value(seconds: float, x: Vector, tables: Tables, parts: Parts) -> tuple[float, float]:
    """Return what is to be least, and by what shares its bounds are exceeded (summed up; 0 where all are kept)."""
    objective = tables.objective
    if objective.kind == _THROUGHPUT:
        return seconds, 0.0
    held = np.empty(tables.classes, np.int64)
    for kind in range(tables.classes):
        held[kind] = held_devices(kind, x, tables, parts)
    if objective.kind != _COST:
        return _time_to_result(seconds, held, tables)
    per_hour = (objective.price * held).sum()
    excess = _excess(seconds, objective.max_iteration_seconds) + _excess(per_hour, objective.budget_per_hour)
    if math.isinf(objective.budget_per_hour):
        return per_hour * seconds / HOUR + TIE * seconds, excess
    return seconds, excess


@njit
def _excess(found: float, limit: float) -> float:
    return max(found / limit * (1 - ROUNDING) - 1, 0.0)


@njit
def _time_to_result(seconds: float, held: Any, tables: Tables) -> tuple[float, float]:
    objective, start = tables.objective, tables.objective.start
    earliest, latest = np.inf, 0.0
    for kind in range(tables.classes):
        if held[kind] > 0:
            earliest = min(earliest, start[tables.site[kind]])
            latest = max(latest, start[tables.site[kind]])
    end = latest + objective.steps * seconds
    hours = np.zeros(tables.sites)
    for kind in range(tables.classes):
        site = tables.site[kind]
        hours[site] += held[kind] * (end - start[site]) / HOUR
    excess = _excess(latest - earliest, objective.gang_timeout_seconds)
    excess += _excess(end - earliest, objective.walltime_seconds)
    excess += _excess(hours.sum(), objective.budget_gpu_hours)
    for site in range(tables.sites):
        excess += _excess(hours[site], objective.site_gpu_hours[site])
    return end, excess


@njit
def held_devices(kind: int, x: Vector, tables: Tables, parts: Parts) -> int:
    """Return how many devices of a class the jobs hold: `hetrl.cost.charges.held_devices`."""
    devices = views(x, tables.tasks, tables.classes)[1]
    size, held, shared = tables.per_node[kind], 0, 0
    for g in range(tables.tasks):
        if devices[g, kind] == 0:
            continue
        used, nodes = _used(g, kind, x, tables, parts)
        if not tables.objective.whole_nodes[kind]:
            held += used
            continue
        whole = devices[g, kind] // size
        held += min(nodes, whole) * size
        if nodes > whole:  # groups may share the node that has what they own beyond whole nodes
            shared |= 1 << remainder_node(g, kind, devices, size)
    while shared > 0:
        held += size * (shared & 1)
        shared >>= 1
    return int(held)


@njit
def _used(g: int, kind: int, x: Vector, tables: Tables, parts: Parts) -> tuple[int, int]:
    """Return how many devices of a class the tasks of a group use together, and on how many of its nodes."""
    group = views(x, tables.tasks, tables.classes)[0]
    used, node = 0, 0
    while True:
        most, following = 0, 0  # devices used on this node; the next one on which it is another number
        for task in range(tables.tasks):
            if group[task] != g or parts.runs[task, kind] == 0:
                continue
            units, ranks, per_node = _units(task, kind, x, tables, parts)
            whole, rest = units // per_node, units % per_node
            if node < whole:
                here, end = per_node * ranks, whole
            elif node == whole and rest > 0:
                here, end = rest * ranks, node + 1
            else:
                continue
            most = max(most, here)
            following = end if following == 0 else min(following, end)
        if following == 0:
            return used, node
        used += most * (following - node)
        node = following


@njit
def _units(task: int, kind: int, x: Vector, tables: Tables, parts: Parts) -> tuple[int, int, int]:
    """Return the units of a task on a class, the ranks of each, and how many a node of the class has room for."""
    _, _, classes, choice = views(x, tables.tasks, tables.classes)
    serving, size, units = tables.serving, tables.per_node[kind], parts.runs[task, kind]
    if tables.is_training[task]:
        return units, 1 << choice[task, TENSOR], size >> choice[task, TENSOR]
    option = classes[task, kind]
    ranks, nodes = serving.tensor[task, kind, option], serving.nodes[task, kind, option]
    if nodes > 1:  # a stage on each node
        return units * nodes, ranks, 1
    ranks *= serving.pipeline[task, kind, option]
    return units, ranks, size // ranks
