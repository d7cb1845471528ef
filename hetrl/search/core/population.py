"""The candidates of one grouping, as `hetrl.search.core.functions.evolve` changes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetrl.search.core.encoding import size_of
from hetrl.search.core.parts import Parts
from hetrl.search.core.records import Flags1, Floats1, Floats2, Genes1, Genes2, Ints1, Ints2, Packed, pack
from hetrl.search.core.tables import Tables


class Population(NamedTuple):
    """Candidates of one grouping, and behind them the best one that annealing has met."""

    x: Genes2  # [candidate + 1, gene]
    value: Floats1  # [candidate + 1] of the objective, infinite where there is none
    floats: Floats2  # [candidate + 1, ..] their parts
    ints: Ints2
    child: Genes1  # [gene] the candidate that waits for a row
    stale: Flags1  # [task]
    counters: Ints1  # [4] candidates there are, children valued, whether one waits, its parent


def new_population(tables: Tables, parts: Parts, group: Sequence[int], candidates: int) -> Packed[Population]:
    """Return an empty population of a grouping (the group of each task)."""
    size, rows = size_of(tables), candidates + 1
    found = Population(
        x=np.zeros((rows, size), np.int32),
        value=np.full(rows, np.inf),
        floats=np.zeros((rows, parts.floats.size)),
        ints=np.zeros((rows, parts.ints.size), np.int64),
        child=np.zeros(size, np.int32),
        stale=np.ones(tables.tasks, np.bool_),
        counters=np.zeros(4, np.int64),
    )
    found.x[:, : tables.tasks] = group
    return pack(found)
