"""What plans of a problem are valued with: numbers, workspace and the parts of one plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetrl.search.core.columns import Columns, make_columns
from hetrl.search.core.parts import Parts, make_parts
from hetrl.search.core.records import Floats1, Ints1, Packed, pack
from hetrl.search.core.tables import Tables

VALUED = -1  # what the core's functions return where they need no row
INFEASIBLE = 1e12  # values from here on are of plans that break a bound of the objective,
UNFIT = 2 * INFEASIBLE  # from here on of plans that their devices or links do not carry


class Shares(NamedTuple):
    """How the work of one serving task is shared out; by class."""

    replicas: Ints1  # that fit
    units: Ints1  # of each replica but the first `extra`
    extra: Ints1  # replicas with one unit more
    row: Ints1  # of `ServingTables.seconds`
    least: Ints1  # units of each replica, at least
    most: Ints1  # and at most


class Room(NamedTuple):
    """Workspace of the evaluation."""

    columns: Columns
    shares: Shares
    seconds: Floats1  # [t] of the tasks, slowed by sharing
    result: Floats1  # [2] the plan's value, and the seconds of an iteration


class Bench:
    """What plans of a problem are valued with; `pointers` are the three as the core takes them."""

    def __init__(self, tables: Tables) -> None:
        """Make room for the plans of a problem."""
        shares = Shares(*np.zeros((6, tables.classes), np.int64))
        self.tables = tables
        self.room = Room(make_columns(tables), shares, np.zeros(tables.tasks), np.zeros(2))
        self.parts = make_parts(tables)
        self.pointers: tuple[Packed[Tables], Packed[Room], Packed[Parts]] = (
            pack(tables),
            pack(self.room),
            pack(self.parts),
        )
