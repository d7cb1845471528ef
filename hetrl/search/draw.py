"""Random vectors: devices dealt to the groups, then every task's choices drawn. All are legal."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetrl.search.chance import State, below, uniform
from hetrl.search.encoding import (
    CACHE,
    CHOICES,
    IDLE,
    MICRO_BATCH,
    PIPELINE,
    RECOMPUTE,
    SHAPE,
    SHAPES,
    SHARDING,
    TENSOR,
    USED,
    Vector,
    repair,
    views,
)
from hetrl.search.jit import njit
from hetrl.search.tables import MAX_STAGES, Tables

# How much of the devices a task tends to want: the seconds of equal devices, training 6 N, decode slow per token.
LIGHT, HEAVY = 1.0, 4.0


@njit
def draw(x: Vector, state: State, tables: Tables) -> None:
    """Draw all but the grouping of a vector."""
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    deal(group, devices, state, tables)
    for task in range(tables.tasks):
        draw_task(task, devices[group[task]], classes[task], choice[task], state, tables)
    repair(x, tables)


@njit
def deal(group: Any, devices: Any, state: State, tables: Tables) -> None:
    """Deal the devices: groups in random order fill up class by class, sites in random order, by random appetites."""
    tasks = tables.tasks
    appetite = np.zeros(tasks)
    for task in range(tasks):
        light = tables.is_inference[task]
        appetite[group[task]] += (LIGHT if light else HEAVY) * (0.2 + 1.3 * uniform(state))
    devices[:] = 0
    groups = shuffled(tasks, state)
    part = appetite / appetite.sum() * tables.devices.sum()
    got = np.zeros(tasks)
    for kind in classes_by_site(state, tables):
        node, left = tables.per_node[kind], tables.devices[kind]
        while left > 0:
            chosen = -1
            for g in groups:  # the first that lacks some, or any one that can use them
                lacks = chosen < 0 or (got[chosen] >= part[chosen] and got[g] < part[g])
                if lacks and part[g] > 0 and able(g, kind, group, tables):
                    chosen = g
            if chosen < 0:
                break
            wanted = max(int(part[chosen] - got[chosen]), 1)
            taken = min(left, rounded(wanted, node, state))
            devices[chosen, kind] += taken
            got[chosen] += taken
            left -= taken


@njit
def able(g: int, kind: int, group: Any, tables: Tables) -> bool:
    """Return whether a task of the group can use a class."""
    found = False
    for task in range(tables.tasks):
        found = found or (group[task] == g and tables.usable[task, kind])
    return found


@njit
def rounded(wanted: int, node: int, state: State) -> int:
    """Return a number of devices near the wanted one: whole nodes, or a power of two inside one."""
    if wanted >= node:
        return (wanted + node // 2) // node * node
    size = 1
    while size * 2 <= wanted:
        size *= 2
    return size if size == wanted or uniform(state) < 0.5 else min(size * 2, node)


@njit
def shuffled(count: int, state: State) -> Any:
    """Return 0 .. count - 1 in random order."""
    order = np.arange(count)
    for index in range(count - 1, 0, -1):
        other = below(state, index + 1)
        order[index], order[other] = order[other], order[index]
    return order


@njit
def classes_by_site(state: State, tables: Tables) -> Any:
    """Return the classes, those of one site together, sites in random order."""
    order = np.empty(tables.classes, np.int64)
    found = 0
    for site in shuffled(tables.sites, state):
        for kind in range(tables.classes):
            if tables.site[kind] == site:
                order[found] = kind
                found += 1
    return order


@njit
def draw_task(task: int, own: Any, classes: Any, choice: Any, state: State, tables: Tables) -> None:
    """Draw all choices of a task on its group's devices."""
    choice[:CHOICES] = 0
    choice[IDLE] = below(state, 3)
    if not tables.is_training[task]:
        draw_options(task, classes, state, tables)
        choice[CACHE] = below(state, tables.serving.cache_gb.size) if uniform(state) < 0.5 else 0
        return
    choice[TENSOR] = below(state, tables.training.most_tensor[task] + 1)
    choice[PIPELINE] = draw_stages(state)
    choice[SHAPE] = below(state, SHAPES)
    choice[MICRO_BATCH] = below(state, tables.training.micro_batches.size)
    choice[RECOMPUTE] = below(state, 2)
    choice[SHARDING] = below(state, 2)
    draw_order(task, own, classes, choice, state, tables)


@njit
def draw_stages(state: State) -> int:
    """Return a number of stages: small ones more often, powers of two mostly."""
    if uniform(state) < 0.7:
        return 1 << below(state, 4)
    return 1 + below(state, MAX_STAGES)


@njit
def draw_options(task: int, options: Any, state: State, tables: Tables) -> None:
    """Draw an option for every class that has one: one random preference for all of them."""
    preferred = uniform(state)
    for kind in range(tables.classes):
        most = tables.serving.options[task, kind]
        options[kind] = 0 if most == 0 else min(1 + int(preferred * preferred * most), most)


@njit
def draw_order(task: int, own: Any, order: Any, choice: Any, state: State, tables: Tables) -> None:
    """Draw the order of classes and how many count: those with devices first, mostly from one to the next nearest."""
    random_order = uniform(state) < 0.3
    left = shuffled(tables.classes, state)
    usable = 0
    for kind in range(tables.classes):
        usable += int(own[kind] > 0 and tables.usable[task, kind])
    for position in range(tables.classes):
        chosen, nearest = position, np.inf
        for index in range(position, tables.classes):
            kind = left[index]
            distance = 1e18 if own[kind] == 0 or not tables.usable[task, kind] else 0.0
            if position > 0 and not random_order:
                distance += min(tables.network.byte[order[position - 1], kind], 1e9)
            if distance < nearest:
                chosen, nearest = index, distance
        left[position], left[chosen] = left[chosen], left[position]
        order[position] = left[position]
    choice[USED] = 1 + below(state, max(usable, 1)) if uniform(state) < 0.6 else max(usable, 1)
