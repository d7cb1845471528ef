"""What the tasks of a plan cost and need, each by itself: a change is valued by what it touched."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.search.core.records import Floats1, Floats2, Ints1, Ints2
from hetrl.search.core.tables import MAX_STAGES, Tables


class Parts(NamedTuple):
    """The tasks (t) of one candidate; classes c, directions d between sites, stages i of the trainer's first replica.

    All lie in the two flat arrays, which are what is copied from candidate to candidate.
    """

    floats: Floats1
    ints: Ints1
    seconds: Floats1  # [t] of an iteration, infinite where the devices do not carry the task
    rollouts: Floats1  # [5] of generation: the fields of `hetrl.cost.generation.ReplicaSeconds`, in order
    switch_seconds: Floats1  # [t]
    resident_gb: Floats2  # [t, c] of the fullest device
    peak_gb: Floats2  # [t, c] of the fullest device while the task runs
    host_gb: Floats2  # [t, c] per device
    runs: Ints2  # [t, c] units in use: serving: replicas with samples; trainings: stages of replicas there
    links: Ints1  # [t] how many directions a training uses
    direction: Ints2  # [t, d] from site x sites + to site
    direction_bytes: Floats2  # [t, d] of an iteration
    stage_kind: Ints1  # [i] the class, -1 behind the last stage
    stage_node: Ints1  # [i] the node among those of its group in the class
    node_bytes: Floats1  # [i] weights that the stage's node holds; 0 where an earlier stage is on the same node
    site_bytes: Floats1  # [i] the same for its site
    version: Floats1  # [2] bytes of all weights, seconds in which the ranks copy them to host memory


def make_parts(tables: Tables) -> Parts:
    """Return room for one candidate."""
    tasks, kinds = tables.tasks, tables.classes
    directions = min(tables.sites * (tables.sites - 1), 2 * MAX_STAGES * (kinds + MAX_STAGES)) + 1
    shapes: dict[str, tuple[int, ...]] = {
        "seconds": (tasks,),
        "rollouts": (5,),
        "switch_seconds": (tasks,),
        "resident_gb": (tasks, kinds),
        "peak_gb": (tasks, kinds),
        "host_gb": (tasks, kinds),
        "direction_bytes": (tasks, directions),
        "node_bytes": (MAX_STAGES,),
        "site_bytes": (MAX_STAGES,),
        "version": (2,),
    }
    integers: dict[str, tuple[int, ...]] = {
        "runs": (tasks, kinds),
        "links": (tasks,),
        "direction": (tasks, directions),
        "stage_kind": (MAX_STAGES,),
        "stage_node": (MAX_STAGES,),
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
