"""What the core works on: what the tasks of a plan cost and need, workspace, the candidates of one grouping, chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.search.core.cohorts import Cohorts, make_cohorts
from hetrl.search.core.encoding import size_of
from hetrl.search.core.records import Flags1, Floats1, Floats2, Genes1, Genes2, Ints1, Ints2, Packed, Words1, pack
from hetrl.search.core.tables import MAX_STAGES, Tables
from hetrl.search.core.tables_serving import ROLLOUTS

VALUED = -1  # what the core's functions return where they need no row
INFEASIBLE = 1e12  # values from here on are of plans that break a bound of the objective,
UNFIT = 2 * INFEASIBLE  # from here on of plans that their devices or links do not carry


class Parts(NamedTuple):
    """The tasks (t) of one candidate, each by itself: a change is valued by what it touched.

    Classes c, directions d between sites, models m that are trained, stages i of the first replica of their training.

    All lie in the two flat arrays, which are what is copied from candidate to candidate.
    """

    floats: Floats1
    ints: Ints1
    seconds: Floats1  # [t] of an iteration, infinite where the devices do not carry the task
    scoring: Floats1  # [t] of these, what the trainer scores the batch for
    rollouts: Floats1  # [7] of generation: the fields of `hetrl.cost.generation.ReplicaSeconds`, in order
    switch_seconds: Floats1  # [t]
    resident_gb: Floats2  # [t, c] of the fullest device
    peak_gb: Floats2  # [t, c] of the fullest device while the task runs
    host_gb: Floats2  # [t, c] per device
    runs: Ints2  # [t, c] units in use: serving: replicas with samples; trainings: stages of replicas there
    links: Ints1  # [t] how many directions a training uses
    direction: Ints2  # [t, d] from site x sites + to site
    direction_bytes: Floats2  # [t, d] of an iteration
    scored_bytes: Floats2  # [t, d] of these, what the trainer scores the batch for
    stage_kind: Ints2  # [m, i] the class, -1 behind the last stage
    stage_node: Ints2  # [m, i] the node among those of its group in the class
    node_bytes: Floats2  # [m, i] weights that the stage's node holds; 0 where an earlier stage is on the same node
    site_bytes: Floats2  # [m, i] the same for its site
    version: Floats2  # [m, 2] bytes of all weights, seconds in which the ranks copy them to host memory


def make_parts(tables: Tables) -> Parts:
    """Return room for one candidate."""
    tasks, kinds, models = tables.tasks, tables.classes, tables.trained.size
    directions = min(tables.sites * (tables.sites - 1), 2 * MAX_STAGES * (kinds + MAX_STAGES)) + 1
    shapes: dict[str, tuple[int, ...]] = {
        "seconds": (tasks,),
        "scoring": (tasks,),
        "rollouts": (ROLLOUTS,),
        "switch_seconds": (tasks,),
        "resident_gb": (tasks, kinds),
        "peak_gb": (tasks, kinds),
        "host_gb": (tasks, kinds),
        "direction_bytes": (tasks, directions),
        "scored_bytes": (tasks, directions),
        "node_bytes": (models, MAX_STAGES),
        "site_bytes": (models, MAX_STAGES),
        "version": (models, 2),
    }
    integers: dict[str, tuple[int, ...]] = {
        "runs": (tasks, kinds),
        "links": (tasks,),
        "direction": (tasks, directions),
        "stage_kind": (models, MAX_STAGES),
        "stage_node": (models, MAX_STAGES),
    }
    floats, float_views = _views(shapes, np.float64)
    ints, int_views = _views(integers, np.int64)
    return Parts(floats=floats, ints=ints, **float_views, **int_views)


def _views(shapes: dict[str, tuple[int, ...]], dtype: type) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    """Return a flat array and the arrays of these shapes that lie in it one after the other."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    flat: npt.NDArray[Any] = np.zeros(int(ends[-1]), dtype)
    pieces = np.split(flat, ends[:-1])
    return flat, {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


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

    cohorts: Cohorts
    shares: Shares
    seconds: Floats1  # [t] of the tasks, slowed by sharing
    scoring: Floats1  # [t] of these, what the trainer scores the batch for
    result: Floats1  # [2] the plan's value, and the seconds of an iteration


class Bench:
    """What plans of a problem are valued with; `pointers` are the three as the core takes them."""

    def __init__(self, tables: Tables) -> None:
        """Make room for the plans of a problem."""
        shares = Shares(*np.zeros((6, tables.classes), np.int64))
        self.tables = tables
        self.room = Room(make_cohorts(tables), shares, np.zeros(tables.tasks), np.zeros(tables.tasks), np.zeros(2))
        self.parts = make_parts(tables)
        self.pointers: tuple[Packed[Tables], Packed[Room], Packed[Parts]] = (
            pack(tables),
            pack(self.room),
            pack(self.parts),
        )


class Population(NamedTuple):
    """Candidates of one grouping, and behind them the best one that annealing has met."""

    x: Genes2  # [candidate + 1, gene]
    value: Floats1  # [candidate + 1] of the objective, guided (`evolve.h`); infinite where there is none
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


def seeded(seed: int) -> Words1:
    """Return the state of the core's random numbers for a seed (any integer): one word, which fixes a whole search."""
    entropy = [abs(seed), int(seed < 0)]  # a SeedSequence takes no negative numbers, xorshift no state of 0
    return np.random.SeedSequence(entropy).generate_state(1, np.uint64) | np.uint64(1)
