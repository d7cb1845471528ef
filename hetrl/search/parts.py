"""What the tasks of a plan cost and need, each by itself: a change is valued by what it touched."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.search.jit import njit
from hetrl.search.record import record_of
from hetrl.search.tables import MAX_STAGES, Tables

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Parts(NamedTuple):
    """The tasks (t) of one candidate; classes c, directions d between sites, stages i of the trainer's first replica.

    All lie in the two flat arrays, which are what is copied from candidate to candidate.
    """

    floats: Floats
    ints: Ints
    seconds: Floats  # [t] of an iteration, infinite where the devices do not carry the task
    rollouts: Floats  # [5] of generation: the fields of `hetrl.cost.generation.ReplicaSeconds`, in order
    switch_seconds: Floats  # [t]
    resident_gb: Floats  # [t, c] of the fullest device
    peak_gb: Floats  # [t, c] of the fullest device while the task runs
    host_gb: Floats  # [t, c] per device
    runs: Ints  # [t, c] units in use: serving: replicas with samples; trainings: stages of replicas there
    links: Ints  # [t] how many directions a training uses
    direction: Ints  # [t, d] from site x sites + to site
    direction_bytes: Floats  # [t, d] of an iteration
    stage_kind: Ints  # [i] the class, -1 behind the last stage
    stage_node: Ints  # [i] the node among those of its group in the class
    node_bytes: Floats  # [i] weights that the stage's node holds; 0 where an earlier stage is on the same node
    site_bytes: Floats  # [i] the same for its site
    version: Floats  # [2] bytes of all weights, seconds in which the ranks copy them to host memory


_Parts = record_of(Parts)


@njit
def parts_record(values: Parts) -> Any:
    """Return the record of these values."""
    return _Parts(*values)


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


@njit
def clear_task(task: int, parts: Parts) -> None:
    """Forget what a task costs and needs."""
    parts.seconds[task] = np.inf
    parts.switch_seconds[task] = 0.0
    parts.resident_gb[task] = 0.0
    parts.peak_gb[task] = 0.0
    parts.host_gb[task] = 0.0
    parts.runs[task] = 0
    parts.links[task] = 0


@njit
def add_bytes(task: int, direction: int, moved: float, parts: Parts) -> None:
    """Add to what a training sends over a direction between sites."""
    for d in range(parts.links[task]):
        if parts.direction[task, d] == direction:
            parts.direction_bytes[task, d] += moved
            return
    parts.direction[task, parts.links[task]] = direction
    parts.direction_bytes[task, parts.links[task]] = moved
    parts.links[task] += 1


@njit
def uses(task: int, direction: int, parts: Parts) -> bool:
    """Return whether a training uses a direction."""
    found = False
    for d in range(parts.links[task]):
        found = found or parts.direction[task, d] == direction
    return found


@njit
def hold(task: int, kind: int, resident: float, peak: float, host: float, parts: Parts) -> None:
    """Take note of a device of a class: the fullest one counts."""
    parts.resident_gb[task, kind] = max(parts.resident_gb[task, kind], resident)
    parts.peak_gb[task, kind] = max(parts.peak_gb[task, kind], peak)
    parts.host_gb[task, kind] = max(parts.host_gb[task, kind], host)
