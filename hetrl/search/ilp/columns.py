"""Columns of the integer program: a set of tasks on an allotment, each task with one of its options.

    for each allotment a
        for each set of tasks S
            columns of (S, a) = the states of S that no other one is nowhere worse than in what other groups notice
    drop columns that one on fewer devices is nowhere worse than

`hetrl.search.core.ilp_states` lists the states.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from hetrl.search.core.functions import choose_states, fill_states
from hetrl.search.core.ilp_states import (
    APART,
    BLOCKS,
    CRITIC,
    GENERATION,
    INFERENCES,
    RUNS,
    SECONDS,
    TRAINING,
    Fixed,
    at,
)
from hetrl.search.core.records import Packed, pack
from hetrl.search.core.tables import Tables
from hetrl.search.ilp.options import Menu, UnfinishedError
from hetrl.search.ilp.space import Floats, Ints, undominated_rows

MOST_STATES = 200_000  # of one allotment: some tens of MB


class Columns(NamedTuple):
    """The columns; tasks as bits, `picks` the row of each task's options, -1 for a task of another group."""

    tasks: Ints  # [column]
    allotment: Ints  # [column]
    numbers: Floats  # [column, SECONDS + 2 x classes]: seconds, then APART, then RUNS
    picks: Ints  # [column, task]


def make_columns(menu: Menu, tables: Tables, limit: float, deadline: float) -> Columns:
    """Return the columns that may be part of a plan of at most `limit` seconds.

    Raises UnfinishedError after the deadline, or where an allotment has more than `MOST_STATES` states.
    """
    order = np.argsort(tables.is_inference, kind="stable")  # inferences last: most have room whatever they choose
    fixed, rest = pack(_fixed(order, tables, limit)), _rest_of(menu, tables)
    width, none = SECONDS + BLOCKS * tables.classes, np.zeros(0, np.int64)
    pool, trace = np.zeros((MOST_STATES, width)), np.zeros((MOST_STATES, 2), np.int64)
    found = [Columns(none, none, np.zeros((0, SECONDS + 2 * tables.classes)), np.zeros((0, tables.tasks), np.int64))]
    for a in range(1, len(menu.allotments)):
        own = [slice(*menu.options[task].first[a : a + 2]) for task in order]
        first = np.array([0, *np.cumsum([part.stop - part.start for part in own])], np.int64)
        numbers = np.concatenate([menu.options[t].numbers[part] for t, part in zip(order, own, strict=True)])
        starts = np.zeros((1 << tables.tasks) + 1, np.int64)
        rest_least = menu.least[order, rest[a]]
        filled = fill_states(numbers, first, menu.least[order, a], rest_least, fixed, pool, trace, starts)
        if filled == MOST_STATES or time.monotonic() > deadline:
            raise UnfinishedError
        noticed = _noticed(pool[:filled], tables.classes)
        places = _columns_of(rest_least, fixed, pool[:filled], noticed, starts)
        sets = np.searchsorted(starts, places, side="right") - 1
        picks = np.empty((len(places), tables.tasks), np.int64)
        picks[:, order] = _picks(places, trace, first, np.array([part.start for part in own]), tables.tasks)
        members = ((sets[:, None] >> np.arange(tables.tasks) & 1) << order).sum(axis=1)
        found.append(Columns(members, np.full(len(places), a), noticed[places], picks))
    return _thinned(Columns._make(np.concatenate(parts) for parts in zip(*found, strict=True)), menu)


def _fixed(order: Ints, tables: Tables, limit: float) -> Fixed:
    phase = np.full(tables.tasks, GENERATION, np.int64)
    phase[tables.is_inference], phase[tables.is_training] = INFERENCES, CRITIC
    phase[tables.trainer] = TRAINING
    place = np.argsort(order)
    return Fixed(
        phase[order],
        int(place[tables.generation]),
        int(place[tables.trainer]),
        tables.classes,
        tables.staleness,
        tables.usable_gb,
        tables.node_gb / tables.per_node,
        limit,
    )


def _rest_of(menu: Menu, tables: Tables) -> Ints:
    """Return, for each allotment, the largest one that the devices beside it allow."""
    left = tables.devices - menu.allotments
    places = [np.searchsorted(counts, left[:, kind], side="right") - 1 for kind, counts in enumerate(menu.counts)]
    return np.ravel_multi_index(places, [len(counts) for counts in menu.counts])


def _noticed(rows: Floats, classes: int) -> Floats:
    """Return the numbers of states that other groups notice: memory is nobody else's concern."""
    apart, runs = at(APART, 0, classes), at(RUNS, 0, classes)
    return np.hstack([rows[:, :SECONDS], rows[:, apart : apart + classes], rows[:, runs : runs + classes]])


def _columns_of(rest_least: Floats, fixed: Packed[Fixed], pool: Floats, noticed: Floats, starts: Ints) -> Ints:
    """Return the states that are columns, those of each set of tasks in a row."""
    places = np.empty(len(pool), np.int64)
    members = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = np.lexsort((noticed[:, :SECONDS].sum(axis=1), members))
    return places[: choose_states(rest_least, fixed, pool, noticed, order, starts, places)]


def _picks(places: Ints, trace: Ints, first: Ints, offset: Ints, tasks: int) -> Ints:
    """Return the option of every task of these states, as rows of `Options`."""
    picks, states = np.full((places.size, tasks), -1), places.copy()
    while (rows := np.flatnonzero(states)).size:
        option = trace[states[rows], 1]
        task = np.searchsorted(first, option, side="right") - 1
        picks[rows, task] = option - first[task] + offset[task]
        states[rows] = trace[states[rows], 0]
    return picks


def _thinned(columns: Columns, menu: Menu) -> Columns:
    """Return the columns that no other one of the same tasks is nowhere worse than, on no more devices."""
    if len(columns.tasks) == 0:
        return columns
    rows = np.hstack([columns.numbers, menu.allotments[columns.allotment]])
    total = rows.sum(axis=1)
    places = []
    for members in np.unique(columns.tasks):
        own = np.flatnonzero(columns.tasks == members)
        places.append(undominated_rows(rows, own[np.argsort(total[own], kind="stable")]))
    kept = np.sort(np.concatenate(places))
    return Columns._make(part[kept] for part in columns)
