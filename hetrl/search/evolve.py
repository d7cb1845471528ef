"""Steady-state evolution of one population, compiled: tournament, mutation, replace the worst.

    repeat `budget` times:
        child = mutate(the better of two drawn from the population)
        value it, unless a plan like it has been valued before
        replace the worst of the population if the child is better

A set of hashes remembers all plans that were valued: what is met again costs nothing and does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.search.chance import State, below, uniform
from hetrl.search.draw import draw
from hetrl.search.encoding import USED, Vector, size_of, views
from hetrl.search.jit import njit
from hetrl.search.mutate import change_group, mutate
from hetrl.search.parts import Parts
from hetrl.search.record import record_of
from hetrl.search.tables import Tables
from hetrl.search.value import VALUED, Room, value

Hashes = npt.NDArray[np.uint64]


class Population(NamedTuple):
    """Candidates of one grouping."""

    x: npt.NDArray[np.int32]  # [candidate, gene]
    value: npt.NDArray[np.float64]  # [candidate] of the objective
    floats: npt.NDArray[np.float64]  # [candidate, ..] their parts
    ints: npt.NDArray[np.int64]
    child: npt.NDArray[np.int32]  # [gene] the candidate that waits for a row
    stale: npt.NDArray[np.bool_]  # [task]
    counters: npt.NDArray[np.int64]  # [3] candidates there are, children valued, whether one waits


_Population = record_of(Population)


@njit
def population_record(values: Population) -> Any:
    """Return the record of these values."""
    return _Population(*values)


def new_population(tables: Tables, parts: Parts, group: Sequence[int], candidates: int) -> tuple[Population, Any]:
    """Return an empty population of a grouping (the group of each task), and its record for compiled code."""
    size = size_of(tables)
    found = Population(
        x=np.zeros((candidates, size), np.int32),
        value=np.full(candidates, np.inf),
        floats=np.zeros((candidates, parts.floats.size)),
        ints=np.zeros((candidates, parts.ints.size), np.int64),
        child=np.zeros(size, np.int32),
        stale=np.ones(tables.tasks, np.bool_),
        counters=np.zeros(3, np.int64),
    )
    found.x[:, : tables.tasks] = group
    return found, population_record(found)


@njit
def hash_of(x: Vector, tables: Tables) -> Any:
    """Return a hash of what a vector says: genes that have no effect do not count. FNV-1a (Fowler, Noll, Vo)."""
    group, devices, classes, choice = views(x, tables.tasks, tables.classes)
    state = np.uint64(14695981039346656037)
    prime = np.uint64(1099511628211)
    for task in range(tables.tasks):
        state = (state ^ np.uint64(group[task])) * prime
        for gene in range(choice.shape[1]):
            if gene != USED or not tables.is_training[task]:
                state = (state ^ np.uint64(choice[task, gene])) * prime
        own = devices[group[task]]
        end = choice[task, USED] if tables.is_training[task] else tables.classes
        for position in range(end):
            kind = classes[task, position] if tables.is_training[task] else position
            if own[kind] > 0 and tables.usable[task, kind]:
                state = (state ^ np.uint64(kind)) * prime
                state = (state ^ np.uint64(own[kind])) * prime
                state = (state ^ np.uint64(classes[task, position])) * prime
        state = (state ^ np.uint64(255)) * prime
    return state | np.uint64(1)


@njit
def is_new(mark: Any, seen: Hashes) -> bool:
    """Insert a hash into the set (open addressing, 0 is empty); False where it was there. A full set forgets."""
    slot = np.int64(mark >> np.uint64(20)) % (seen.size - 1)
    for _ in range(32):
        if seen[slot] == mark:
            return False
        if seen[slot] == 0:
            seen[slot] = mark
            return True
        slot = (slot + 1) % (seen.size - 1)
    seen[slot] = mark
    return True


@njit
def evolve(
    population: Population,
    budget: int,
    limit: int,
    regroup: float,
    state: State,
    tables: Tables,
    room: Room,
    parts: Parts,
    seen: Hashes,
) -> int:
    """Value `budget` children (drawn at random until `limit` candidates are there); return `VALUED` or a missing row.

    A share `regroup` of the children change the grouping. `population.counters[1]` counts the children. After a missing
    row call again with the same budget: the waiting child comes first.
    """
    tries = 0
    while population.counters[1] < budget and tries < 20 * budget:
        if not population.counters[2]:
            tries += 1
            if not _next_child(population, limit, regroup, state, tables, parts, seen):
                continue
            population.counters[2] = 1
        row = value(population.child, population.stale, tables, room, parts)
        if row != VALUED:
            return row
        population.counters[2] = 0
        population.counters[1] += 1
        _admit(population, limit, room.result[0], parts)
    return VALUED


@njit
def _next_child(
    population: Population, limit: int, regroup: float, state: State, tables: Tables, parts: Parts, seen: Hashes
) -> bool:
    """Make the next child and bring its parent's parts along; False where it is a known plan."""
    x, child = population.x, population.child
    if population.counters[0] < limit:
        child[: tables.tasks] = x[0, : tables.tasks]
        draw(child, state, tables)
        population.stale[:] = True
        return is_new(hash_of(child, tables), seen)
    a, b = below(state, limit), below(state, limit)
    parent = a if population.value[a] <= population.value[b] else b
    child[:] = x[parent]
    population.stale[:] = False
    if uniform(state) < regroup:
        change_group(child, population.stale, state, tables)
    else:
        mutate(child, population.stale, state, tables)
    if not is_new(hash_of(child, tables), seen):
        return False
    parts.floats[:] = population.floats[parent]
    parts.ints[:] = population.ints[parent]
    return True


@njit
def _admit(population: Population, limit: int, found: float, parts: Parts) -> None:
    """Add the child while there is room; then let it replace the worst if it is no worse."""
    if population.counters[0] < limit:
        place = population.counters[0]
        population.counters[0] += 1
    else:
        place = np.argmax(population.value[:limit])
        if found > population.value[place] or (np.isinf(found) and np.isinf(population.value[place])):
            return
    population.x[place] = population.child
    population.value[place] = found
    population.floats[place] = parts.floats
    population.ints[place] = parts.ints
