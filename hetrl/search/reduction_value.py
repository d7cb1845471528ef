"""Seconds of the data-parallel reduction of a training laid out in columns: `hetrl.cost.network`, summed up by classes.

The ranks of one stage, over all replicas, form `2^tensor` equal rings. Which nodes they touch follows from the places
of the columns (`hetrl.search.columns`): inside a column they stand at equal distances.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetrl.search.columns import Columns
from hetrl.search.encoding import ALIKE, PIPELINE, SHAPE, SHARDING, TENSOR
from hetrl.search.jit import njit
from hetrl.search.parts import Parts, add_bytes, uses
from hetrl.search.tables import Tables


@njit
def reduction_seconds(
    task: int, found: int, choice: Any, tables: Tables, columns: Columns, parts: Parts, other: int, fresh: bool
) -> float:
    """Return the time of one reduction beside the task `other`, which uses its directions too (itself: alone).

    The slowest of lanes inside nodes, network interfaces and links between sites, and the latency of the slowest ring.
    """
    replicas = columns.replicas[:found].sum()
    if replicas < 2:
        return 0.0
    numbers, ranks = tables.training, 1 << choice[TENSOR]
    lanes, latency, wan = 0.0, 0.0, 0.0
    sites = np.empty(tables.sites, np.int64)
    load = np.zeros((tables.sites, tables.sites))
    for i in range(choice[PIPELINE]):
        first, last = int(i == 0), int(i == choice[PIPELINE] - 1)
        constant, per_layer = numbers.parameters[task, choice[TENSOR], first, last]
        parameters = constant + per_layer * columns.layers[i]
        gradient, weights = parameters * numbers.gradient_bytes, parameters * numbers.weight_bytes
        moved = (replicas - 1) / replicas * (gradient + (weights if choice[SHARDING] else gradient))
        nodes, count, local = _ring(i, found, choice, tables, columns, sites)
        if nodes < replicas:
            for q in range(found):
                lanes = max(lanes, moved * tables.network.peer[columns.kind[q, i]])
        columns.load[i] = ranks * moved if nodes > 1 else 0.0
        delay = 0.0
        for s in range(count - 1):
            delay = max(delay, tables.network.link_delay[sites[s], sites[s + 1]])
        latency = max(latency, local + 2 * (count - 1) * delay)
        if count > 1:
            part = (count - 1) / count
            around = ranks * (2 * part * gradient + (part * weights if choice[SHARDING] else 0.0))
            for s in range(count):
                load[sites[s], sites[(s + 1) % count]] += around
    for a in range(tables.sites):
        for b in range(tables.sites):
            if load[a, b] > 0:
                direction = a * tables.sites + b
                shared = 2 if other != task and uses(other, direction, parts) else 1
                wan = max(wan, load[a, b] * shared * _best_byte(a, b, found, choice, tables, columns))
                if fresh:
                    add_bytes(task, direction, numbers.steps * load[a, b], parts)
    return max(lanes, _interfaces(found, choice, tables, columns), wan) + latency


@njit
def _ring(i: int, found: int, choice: Any, tables: Tables, columns: Columns, sites: Any) -> tuple[int, int, float]:
    """Return the nodes and sites that a ring of stage i touches, and its latency inside sites; fills `sites`."""
    nodes, count, local, inside = 0, 0, 0.0, 0.0
    members = np.zeros(tables.sites, np.int64)
    for q in range(found):
        kind = columns.kind[q, i]
        site = tables.site[kind]
        if members[site] == 0:
            sites[count] = site
            count += 1
        members[site] += columns.replicas[q]
        units = tables.per_node[kind] >> choice[TENSOR]
        start = columns.offset[q, i] // units
        end = (columns.offset[q, i] + (columns.replicas[q] - 1) * columns.stride[q, i]) // units
        nodes += columns.replicas[q] if columns.stride[q, i] >= units else end - start + 1
        for before in range(q - 1, -1, -1):
            if columns.kind[before, i] == kind:  # it stands before this column in the class: they may meet in a node
                last = columns.offset[before, i] + (columns.replicas[before] - 1) * columns.stride[before, i]
                nodes -= int(last // units == start)
                break
    for q in range(found):
        kind = columns.kind[q, i]
        exchanges = 2 * (members[tables.site[kind]] - 1)
        local = max(local, exchanges * tables.network.site_delay[tables.site[kind]])
        inside = max(inside, exchanges * tables.network.node_delay[kind])
    return nodes, count, inside if nodes == count else local


@njit
def _best_byte(a: int, b: int, found: int, choice: Any, tables: Tables, columns: Columns) -> float:
    """Return the seconds per byte between the best-connected classes of two sites: the gateways stand there."""
    best, site, kind, byte = np.inf, tables.site, columns.kind, tables.network.byte
    for q in range(found):
        for i in range(choice[PIPELINE]):
            if site[kind[q, i]] != a:
                continue
            for p in range(found):
                for j in range(choice[PIPELINE]):
                    if site[kind[p, j]] == b:
                        best = min(best, byte[kind[q, i], kind[p, j]])
    return best


@njit
def _interfaces(found: int, choice: Any, tables: Tables, columns: Columns) -> float:
    """Return the time of the busiest node's network interface: all rings of the stages that the node holds."""
    slowest = 0.0
    columns.cursor[:] = -1  # the node that the last run of the class ends in
    columns.held[:] = 0  # its stages, as bits
    for q in range(found):
        first = 0
        while first < choice[PIPELINE]:
            kind, stride = columns.kind[q, first], columns.stride[q, first]
            run = 1 if choice[SHAPE] >= ALIKE else stride
            slowest = max(slowest, _run_interfaces(q, first, run, kind, choice, tables, columns))
            first += run
    return slowest


@njit
def _run_interfaces(q: int, first: int, run: int, kind: int, choice: Any, tables: Tables, columns: Columns) -> float:
    """Return the time of the busiest node of one run of stages; nodes repeat after as many as it has stages."""
    units = tables.per_node[kind] >> choice[TENSOR]
    begin = columns.offset[q, first]
    end = begin + run * columns.replicas[q]
    last = (end - 1) // units
    slowest, node = 0.0, begin // units
    while node <= last:
        held = columns.held[kind] if columns.cursor[kind] == node else 0
        stop = min(end, (node + 1) * units)
        for unit in range(max(begin, node * units), stop):
            held |= 1 << (first + (unit - begin) % run)
        load = 0.0
        for i in range(choice[PIPELINE]):
            if held >> i & 1:
                load += columns.load[i]
        slowest = max(slowest, load * tables.network.nic[kind])
        columns.cursor[kind], columns.held[kind] = node, held
        node = node + 1 if node <= begin // units + run else max(last, node + 1)
    return slowest
