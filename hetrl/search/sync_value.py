"""Seconds of a weight version: `hetrl.cost.weight_sync.weight_sync_cost`, summed up by classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetrl.search.jit import njit
from hetrl.search.parts import Parts
from hetrl.search.tables import Tables


@njit
def sync_seconds(group: Any, devices: Any, classes: Any, tables: Tables, parts: Parts) -> tuple[float, float]:
    """Return transfer and pause: encode, every uplink once, fan-out inside the sites; load."""
    runs, options = parts.runs[tables.generation], classes[tables.generation]
    tensor, pipeline = tables.serving.tensor[tables.generation], tables.serving.pipeline[tables.generation]
    host_byte, version_seconds, pause = tables.host_byte, tables.version_seconds, 0.0
    for kind in range(runs.size):
        if runs[kind] > 0:
            ranks = tensor[kind, options[kind]] * pipeline[kind, options[kind]]
            pause = max(pause, parts.version[0] / ranks * host_byte[kind] + version_seconds[kind])
    links, inside = _uplinks(tables, parts), _fan_out(group, devices, classes, tables, parts)
    return max(parts.version[1], links, inside), pause


@njit
def first_rollouts(kind: int, runs: Any, site: Any) -> bool:
    """Return whether a class has rollout replicas (`runs` by class) and is the first of its site that has."""
    found = runs[kind] > 0
    for before in range(kind):
        if site[before] == site[kind] and runs[before] > 0:
            found = False
    return bool(found)


@njit
def _uplinks(tables: Tables, parts: Parts) -> float:
    """Return the slowest of: each link alone; each source's uplink with all that leaves it through its best node."""
    slowest, site, uplink, site_bytes = 0.0, tables.site, tables.network.uplink, parts.site_bytes
    rollouts, trains = parts.runs[tables.generation], parts.runs[tables.trainer]
    for i in range(site_bytes.size):
        if site_bytes[i] == 0:
            continue
        source, leaving, best = site[parts.stage_kind[i]], 0.0, np.inf
        for kind in range(site.size):
            if site[kind] == source:
                if rollouts[kind] > 0 or trains[kind] > 0:
                    best = min(best, uplink[kind])
            elif first_rollouts(kind, rollouts, site):
                byte, delay = _best_path(source, site[kind], rollouts, trains, tables)
                slowest = max(slowest, delay + site_bytes[i] * byte)
                leaving += site_bytes[i]
        if leaving > 0:
            slowest = max(slowest, leaving * best)
    return slowest


@njit
def _best_path(source: int, target: int, rollouts: Any, trains: Any, tables: Tables) -> tuple[float, float]:
    """Return seconds per byte and delay between the best-connected nodes: the gateways of a version stand there."""
    byte, delay, site = np.inf, np.inf, tables.site
    bytes_between, delays = tables.network.byte, tables.network.delay
    for a in range(site.size):
        if site[a] != source or (rollouts[a] == 0 and trains[a] == 0):
            continue
        for b in range(site.size):
            used = site[b] == target and (rollouts[b] > 0 or trains[b] > 0)
            if used and bytes_between[a, b] < byte:
                byte, delay = bytes_between[a, b], delays[a, b]
    return byte, delay


@njit
def _fan_out(group: Any, devices: Any, classes: Any, tables: Tables, parts: Parts) -> float:
    """Return the slowest interface: a rollout node receives what it lacks, one with weights sends them to its site."""
    slowest, total, nic, site = 0.0, parts.version[0], tables.network.nic, tables.site
    runs, stage_kind, node_bytes = parts.runs[tables.generation], parts.stage_kind, parts.node_bytes
    for kind in range(runs.size):
        if runs[kind] == 0:
            continue
        nodes, with_weights = _rollout_nodes(kind, group, devices, classes, tables, parts), 0
        for i in range(node_bytes.size):
            held = node_bytes[i] > 0 and stage_kind[i] == kind
            if held and _generates_too(i, nodes, group, devices, tables, parts):
                with_weights += 1
                slowest = max(slowest, (total - node_bytes[i]) * nic[kind])
        if with_weights < nodes:
            slowest = max(slowest, total * nic[kind])
    for i in range(node_bytes.size):
        if node_bytes[i] == 0:
            continue
        here, others = stage_kind[i], 0
        for kind in range(runs.size):
            if site[kind] == site[here] and runs[kind] > 0:
                nodes = _rollout_nodes(kind, group, devices, classes, tables, parts)
                others += nodes
                if kind == here and _generates_too(i, nodes, group, devices, tables, parts):
                    others -= 1
        if others > 0:
            slowest = max(slowest, node_bytes[i] * nic[here])
    return float(slowest)


@njit
def _rollout_nodes(kind: int, group: Any, devices: Any, classes: Any, tables: Tables, parts: Parts) -> int:
    """Return how many nodes of a class have rollout replicas: they fill the group's nodes in order."""
    serving, generation = tables.serving, tables.generation
    option, runs = classes[generation, kind], parts.runs[generation, kind]
    if serving.nodes[generation, kind, option] > 1:
        return int(runs * serving.nodes[generation, kind, option])
    needed = serving.tensor[generation, kind, option] * serving.pipeline[generation, kind, option]
    size = tables.per_node[kind]
    per_node, whole = size // needed, devices[group[generation], kind] // size
    return int(-(-runs // per_node) if runs <= whole * per_node else whole + 1)


@njit
def _generates_too(i: int, nodes: int, group: Any, devices: Any, tables: Tables, parts: Parts) -> bool:
    """Return whether the node of stage i is one of so many rollout nodes of its class.

    Inside one group both count the same nodes. Different groups meet only where their remainders share a node.
    """
    kind, node = parts.stage_kind[i], parts.stage_node[i]
    trainer, generator = group[tables.trainer], group[tables.generation]
    if trainer == generator:
        return bool(node < nodes)
    size = tables.per_node[kind]
    if node < devices[trainer, kind] // size or nodes <= devices[generator, kind] // size:
        return False  # one of them is a whole node
    return remainder_node(trainer, kind, devices, size) == remainder_node(generator, kind, devices, size)


@njit
def remainder_node(wanted: int, kind: int, devices: Any, size: int) -> int:
    """Return which of the shared nodes of a class holds a group's remainder; they are dealt as `Space.pack` does."""
    groups = devices.shape[0]
    rooms, done = np.zeros(groups, np.int64), np.zeros(groups, np.bool_)
    opened = 0
    for _ in range(groups):
        largest = -1
        for g in range(groups):
            if not done[g] and (largest < 0 or devices[g, kind] % size > devices[largest, kind] % size):
                largest = g
        done[largest] = True
        place = 0
        while place < opened and rooms[place] < devices[largest, kind] % size:
            place += 1
        if place == opened:
            rooms[place] = size
            opened += 1
        if largest == wanted:
            return place
        rooms[place] -= devices[largest, kind] % size
    return -1  # not reached: every group gets its turn
