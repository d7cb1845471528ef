"""States: what a set of tasks on one allotment costs and needs, with every choice of options worth keeping.

    states of no task = one state, all numbers 0
    for each set of tasks S, smaller ones first
        for each state of S without its last task, each option of the last task
            add their numbers; keep it if memory fits, it may beat the limit, and no kept state is nowhere worse

A state cannot beat the limit if its phases, with those of the fastest options that the other tasks have in the group
or on the devices left, take longer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetrl.search.ilp_space import (
    ACTIVE,
    APART,
    CHAIN,
    EARLY,
    HOST,
    INFERENCES,
    RESIDENT,
    RUNS,
    TOGETHER,
    TRAININGS,
    TRANSFER,
    Floats,
    Ints,
    at,
    dominated,
)
from hetrl.search.jit import njit


class Fixed(NamedTuple):
    """What does not change from allotment to allotment; tasks in the order in which they are added."""

    phase: Ints  # [task] GENERATION, INFERENCES or TRAININGS
    generation: int
    trainer: int
    classes: int
    staleness: int
    usable_gb: Floats
    node_gb: Floats
    limit: float


@njit
def fill(
    numbers: Floats,
    first: Ints,
    own_least: Floats,
    rest_least: Floats,
    fixed: Fixed,
    pool: Floats,
    trace: Ints,
    starts: Ints,
) -> int:
    """Fill the pool with the states of every set of tasks on one allotment; return how many there are.

    `trace` has each state's parent and option; the states of set S are the rows `starts[S]` to `starts[S + 1]`.
    """
    tasks, width = fixed.phase.size, pool.shape[1]
    pool[0], starts[0], starts[1], filled = 0.0, 0, 1, 1
    row, alive = np.zeros(width), np.ones(numbers.shape[0], np.bool_)
    for task in range(tasks):
        for option in range(first[task], first[task + 1]):
            alive[option] = bound(numbers[option], 1 << task, own_least, rest_least, fixed) <= fixed.limit
    most = _most_ahead(numbers, first, fixed.classes)
    for members in range(1, 1 << tasks):
        last = 0
        while members >> (last + 1):
            last += 1
        parent = members ^ (1 << last)
        begin = filled
        for p in range(starts[parent], starts[parent + 1]):
            for option in range(first[last], first[last + 1]):
                if not alive[option]:
                    continue
                _add(pool[p], numbers[option], members, last, fixed, row)
                if not _has_room(row, fixed) or bound(row, members, own_least, rest_least, fixed) > fixed.limit:
                    continue
                _forget_room(row, most[last], fixed)
                if filled < pool.shape[0] and not dominated(row, pool[begin:], filled - begin, width):
                    filled = _insert(row, p, option, begin, filled, pool, trace)
        starts[members + 1] = filled
    return filled


@njit
def _most_ahead(numbers: Floats, first: Ints, classes: int) -> Floats:
    """Return the most that the tasks behind each one may add to RESIDENT, ACTIVE and HOST of each class."""
    tasks = first.size - 1
    most = np.zeros((tasks + 1, 3, classes))
    for last in range(tasks - 1, 0, -1):
        most[last - 1] = most[last]
        if first[last] == first[last + 1]:
            continue
        for kind in range(classes):
            for block in (RESIDENT, ACTIVE, HOST):
                largest = numbers[first[last] : first[last + 1], at(block, kind, classes)].max()
                summed = most[last, block, kind] + largest
                most[last - 1, block, kind] = max(most[last, block, kind], largest) if block == ACTIVE else summed
    return most


@njit
def _forget_room(row: Floats, most: Floats, fixed: Fixed) -> None:
    """Set the memory to 0 that suffices whatever the tasks behind add: less of it makes no state better."""
    for kind in range(fixed.classes):
        resident, active = at(RESIDENT, kind, fixed.classes), at(ACTIVE, kind, fixed.classes)
        host = at(HOST, kind, fixed.classes)
        if row[resident] + most[RESIDENT, kind] + max(row[active], most[ACTIVE, kind]) <= fixed.usable_gb[kind]:
            row[resident] = row[active] = 0.0
        if row[host] + most[HOST, kind] <= fixed.node_gb[kind]:
            row[host] = 0.0


@njit
def _add(state: Floats, option: Floats, members: int, last: int, fixed: Fixed, row: Floats) -> None:
    """Set the state of a set of tasks from that without its last task and an option of that."""
    for place in range(row.size):
        row[place] = state[place] + option[place]
    for kind in range(fixed.classes):
        place = at(ACTIVE, kind, fixed.classes)
        row[place] = max(state[place], option[place])
    both = (1 << fixed.trainer) | (1 << fixed.generation)
    if (both >> last) & 1 and members & both == both:
        for kind in range(fixed.classes):
            if row[at(RUNS, kind, fixed.classes)] > 0:
                row[TRANSFER] = max(row[TRANSFER], row[at(TOGETHER, kind, fixed.classes)])
        for block in (APART, TOGETHER, RUNS):
            for kind in range(fixed.classes):
                row[at(block, kind, fixed.classes)] = 0.0


@njit
def _has_room(row: Floats, fixed: Fixed) -> bool:
    """Return whether what all tasks keep, and the largest active set, fit each class; host memory likewise."""
    for kind in range(fixed.classes):
        held = row[at(RESIDENT, kind, fixed.classes)] + row[at(ACTIVE, kind, fixed.classes)]
        if held > fixed.usable_gb[kind] or row[at(HOST, kind, fixed.classes)] > fixed.node_gb[kind]:
            return False
    return True


@njit
def bound(row: Floats, members: int, own_least: Floats, rest_least: Floats, fixed: Fixed) -> float:
    """Return a bound below every iteration with this state.

    The other tasks take at least `own_least` seconds if they join the group, and `rest_least` on the devices left.
    """
    phases = np.zeros(CHAIN)
    for phase in range(CHAIN):
        phases[phase] = _phase_bound(phase, row[phase], members, own_least, rest_least, fixed)
    if fixed.staleness == 0:
        return float(phases.sum() + row[TRANSFER])
    busy, longest = row[:CHAIN].sum(), 0.0
    for task in range(own_least.size):
        if not members >> task & 1:
            longest = max(longest, min(own_least[task], rest_least[task]))
            busy += own_least[task] if rest_least[task] > fixed.limit else 0.0
    chain = phases[INFERENCES] + phases[TRAININGS] + row[CHAIN] + row[TRANSFER]
    return float(max(busy, longest, row[TRANSFER], chain / (1 + fixed.staleness - row[EARLY])))


@njit
def _phase_bound(
    phase: int, seconds: float, members: int, own_least: Floats, rest_least: Floats, fixed: Fixed
) -> float:
    """Return the least length of a phase in which the group is busy for so long.

    If tasks that take up to `longest` on other devices stay out, all that take longer there join.
    """
    least, tasks = np.inf, own_least.size
    for last in range(-1, tasks):
        if last >= 0 and (members >> last & 1 or fixed.phase[last] != phase):
            continue
        longest, joined = rest_least[last] if last >= 0 else 0.0, seconds
        for task in range(tasks):
            if not members >> task & 1 and fixed.phase[task] == phase and rest_least[task] > longest:
                joined += own_least[task]
        least = min(least, max(joined, longest))
    return least


@njit
def _insert(row: Floats, p: int, option: int, begin: int, filled: int, pool: Floats, trace: Ints) -> int:
    """Add a state in place of those that it is nowhere worse than; return the new end."""
    end = begin
    for n in range(begin, filled):
        worse = True
        for place in range(row.size):
            if pool[n, place] < row[place]:
                worse = False
                break
        if not worse:
            pool[end], trace[end] = pool[n], trace[n]
            end += 1
    pool[end], trace[end, 0], trace[end, 1] = row, p, option
    return end + 1
