"""Changes of a vector at one of the levels, as the evolution tries them.

    level 1      a task goes to another group, or to one of its own: only where groupings may change (`change_group`)
    level 2, 3   devices of a class go from one group to another, or to and from the idle ones;
                 whole nodes, halves, quarters, one, or all; half the time as many of another class come back
    level 4      one choice of one task: TP, PP, shape, micro-batch, recomputation, sharding, idle state, KV cap,
                 the option of a class, or all of them drawn anew
    level 5      the order of a training's classes: two change places, one goes to the front, more or fewer count

Every change flags the tasks whose costs it may touch.
"""

from __future__ import annotations

from typing import Any

from hetrl.search.chance import State, below, uniform
from hetrl.search.draw import draw_options, draw_order, draw_stages, draw_task
from hetrl.search.encoding import (
    CACHE,
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
from hetrl.search.tables import Tables

MOVES = 0.35  # share of changes that move devices


@njit
def mutate(x: Vector, stale: Any, state: State, tables: Tables) -> None:
    """Change a vector in place once, sometimes twice or more; flag the touched tasks as stale."""
    while True:
        if uniform(state) < MOVES:
            _move_devices(x, stale, state, tables)
        else:
            task = below(state, tables.tasks)
            stale[task] = True
            _change_task(task, x, state, tables)
        if uniform(state) < 0.65:
            break
    repair(x, tables)


@njit
def change_group(x: Vector, stale: Any, state: State, tables: Tables) -> None:
    """Move a task in place to another group, or to one of its own with some of its group's devices; flag both groups.

    A group that is left without a task gives its devices to the other one.
    """
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    groups, task = group.max() + 1, below(state, tables.tasks)
    source, target = group[task], below(state, groups)
    _touch(source, group, stale)
    if target == source and groups < tables.tasks:
        target = groups
        for kind in range(tables.classes):
            if uniform(state) < 0.5:
                _shift(source, target, groups + 1, kind, devices[source, kind], devices)
    group[task] = target
    if not (group == source).any():
        devices[target] += devices[source]
        devices[source] = 0
    _touch(target, group, stale)
    if tables.is_training[task]:
        draw_order(task, devices[target], classes[task], choice[task], state, tables)
    _settle(source, group, devices, classes, choice, state, tables)
    _settle(target, group, devices, classes, choice, state, tables)
    repair(x, tables)


@njit
def _touch(g: int, group: Any, stale: Any) -> None:
    for task in range(group.size):
        stale[task] = stale[task] or group[task] == g


@njit
def _move_devices(x: Vector, stale: Any, state: State, tables: Tables) -> None:
    """Move devices of one class; the row behind the last group stands for the idle ones."""
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    groups = group.max() + 1
    kind = below(state, tables.classes)
    source, target = below(state, groups + 1), below(state, groups)
    if source >= target:
        source, target = target, source + 1 if source == target else source
    if uniform(state) < 0.5:
        source, target = target, source
    available = _owned(source, groups, kind, devices, tables)
    if available == 0:
        return
    amount = min(_amount(tables.per_node[kind], available, state), available)
    _shift(source, target, groups, kind, amount, devices)
    if uniform(state) < 0.5:
        other = below(state, tables.classes)
        back = min(amount, _owned(target, groups, other, devices, tables))
        if other != kind and back > 0:
            _shift(target, source, groups, other, back, devices)
    for g in (source, target):
        if g < groups:
            _touch(g, group, stale)
            _settle(g, group, devices, classes, choice, state, tables)


@njit
def _owned(g: int, groups: int, kind: int, devices: Any, tables: Tables) -> int:
    """Return the devices of a class that a group owns, or that no group does."""
    if g < groups:
        return int(devices[g, kind])
    return int(tables.devices[kind] - devices[:groups, kind].sum())


@njit
def _shift(source: int, target: int, groups: int, kind: int, amount: int, devices: Any) -> None:
    if source < groups:
        devices[source, kind] -= amount
    if target < groups:
        devices[target, kind] += amount


@njit
def _amount(node: int, available: int, state: State) -> int:
    """Draw how many devices to move: mostly whole nodes, then halves, quarters and single ones, or all."""
    drawn = below(state, 8)
    if drawn < 3:
        return node
    if drawn == 3:
        return max(node // 2, 1)
    if drawn == 4:
        return max(node // 4, 1)
    if drawn == 5:
        return 1
    if drawn == 6:
        return available
    return node * (1 + below(state, max(available // node, 1)))


@njit
def _settle(g: int, group: Any, devices: Any, classes: Any, choice: Any, state: State, tables: Tables) -> None:
    """Let the tasks of a group use the classes that it has: serving takes them up, trainings may draw an order."""
    for task in range(tables.tasks):
        if group[task] != g:
            continue
        if tables.is_training[task]:
            if uniform(state) < 0.4:
                draw_order(task, devices[g], classes[task], choice[task], state, tables)
            continue
        for kind in range(tables.classes):
            if devices[g, kind] > 0 and classes[task, kind] == 0 and uniform(state) < 0.8:
                classes[task, kind] = min(1 + below(state, 2), tables.serving.options[task, kind])


@njit
def _change_task(task: int, x: Vector, state: State, tables: Tables) -> None:
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    own = devices[group[task]]
    if uniform(state) < 0.04:
        draw_task(task, own, classes[task], choice[task], state, tables)
    elif tables.is_training[task]:
        _change_training(task, own, classes[task], choice[task], state, tables)
    else:
        _change_serving(task, own, classes[task], choice[task], state, tables)


@njit
def _change_training(task: int, own: Any, order: Any, choice: Any, state: State, tables: Tables) -> None:
    drawn = below(state, 14)
    if drawn < 2:
        choice[TENSOR] = _other(choice[TENSOR], tables.training.most_tensor[task] + 1, state)
    elif drawn < 4:
        choice[PIPELINE] = draw_stages(state)
    elif drawn == 4:
        choice[SHAPE] = _other(choice[SHAPE], SHAPES, state)
    elif drawn == 5:
        choice[MICRO_BATCH] = _other(choice[MICRO_BATCH], tables.training.micro_batches.size, state)
    elif drawn == 6:
        choice[RECOMPUTE] = 1 - choice[RECOMPUTE]
    elif drawn == 7:
        choice[SHARDING] = 1 - choice[SHARDING]
    elif drawn == 8:
        choice[IDLE] = 1 - min(choice[IDLE], 1)
    elif drawn == 9:  # a chain of changes that only pay together
        choice[TENSOR] = below(state, tables.training.most_tensor[task] + 1)
        choice[PIPELINE] = draw_stages(state)
        choice[SHAPE] = below(state, SHAPES)
    else:
        _change_order(task, own, order, choice, state, tables)


@njit
def _other(value: int, count: int, state: State) -> int:
    """Return another of 0 .. count - 1, where there is one."""
    return int((value + 1 + below(state, count - 1)) % count) if count > 1 else 0


@njit
def _change_order(task: int, own: Any, order: Any, choice: Any, state: State, tables: Tables) -> None:
    drawn = below(state, 5)
    used = choice[USED]
    if drawn == 0:
        draw_order(task, own, order, choice, state, tables)
    elif drawn == 1:
        choice[USED] = used + 1 if uniform(state) < 0.5 else used - 1
    elif drawn == 2:
        a, b = below(state, used), below(state, tables.classes)
        order[a], order[b] = order[b], order[a]
    elif drawn == 3:
        a, b = below(state, used), below(state, used)
        order[a], order[b] = order[b], order[a]
    else:  # the last one used leaves, another class takes its place
        a = below(state, used)
        order[a], order[used - 1] = order[used - 1], order[a]
        choice[USED] = used - 1


@njit
def _change_serving(task: int, own: Any, options: Any, choice: Any, state: State, tables: Tables) -> None:
    drawn = below(state, 10)
    if drawn < 5:
        kind = below(state, tables.classes)
        for _ in range(8):  # of a class that counts
            if own[kind] == 0:
                kind = below(state, tables.classes)
        options[kind] = _other(options[kind], tables.serving.options[task, kind] + 1, state)
    elif drawn < 6:
        draw_options(task, options, state, tables)
    elif drawn < 8 or task != tables.generation:
        choice[IDLE] = below(state, 3) if task == tables.generation else 1 - min(choice[IDLE], 1)
    elif uniform(state) < 0.5:
        choice[CACHE] = below(state, tables.serving.cache_gb.size)
    else:
        choice[CACHE] += 1 if uniform(state) < 0.5 else -1
