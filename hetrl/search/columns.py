"""From a training's genes to columns: equal replicas, counted, with their places in the nodes.

A *unit* is the tensor-parallel ranks of one stage of one replica, inside one node. The units of a group's devices stand
in a chain: class by class in the training's order, whole nodes first, then the remainder. With p stages and r replicas

    stages by class     replica i takes the units i, i + r, i + 2 r, ...     a stage fills classes one after the other
    replicas by class   replica i takes the units i p .. i p + p - 1         a replica does
    whole replicas      the same, but no replica has units of two classes

A *column* stands for `count` replicas whose stages lie on the same classes. Inside a class its replicas follow each
other, either with the stages of one replica side by side, or with one stage of all replicas side by side (`ALIKE`):
the first keeps activations inside nodes, the second gradients. Stage i of replica r is unit `offset[i] + r stride[i]`
of its class. So the work grows with classes and stages, not with devices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hetrl.search.encoding import (
    ALIKE,
    MICRO_BATCH,
    PIPELINE,
    SHAPE,
    STAGES_BY_CLASS,
    TENSOR,
    USED,
    WHOLE_REPLICAS,
)
from hetrl.search.jit import njit
from hetrl.search.record import record_of
from hetrl.search.tables import MAX_STAGES, Tables

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Columns(NamedTuple):
    """One training's columns (q) of stages (i); written by `lay_out`, `split_layers`, `share_samples`."""

    kind: Ints  # [q, i]
    offset: Ints  # [q, i]
    stride: Ints  # [q, i]
    replicas: Ints  # [q] how many replicas it stands for
    layers: Ints  # [i]
    samples: Ints  # [q] of each replica but the first `extra`
    extra: Ints  # [q] replicas that have `unit` samples more
    order: Ints  # [c] classes of the chain
    units: Ints  # [c] how many units each has
    cursor: Ints  # [c]
    held: Ints  # [c]
    cuts: Ints  # [q]
    slope: Floats  # [q] seconds per unit of samples
    start: Floats  # [q] seconds beside them
    capacity: Floats  # [i] most layers of a stage
    layer: Floats  # [i] seconds per layer
    beside: Floats  # [i] seconds beside the layers
    both: Floats  # [i] forward and backward of one micro-batch
    hop: Floats  # [i] to the next stage
    load: Floats  # [i] bytes that all rings of a stage send through a node


_Columns = record_of(Columns)


@njit
def columns_record(values: Columns) -> Any:
    """Return the record of these values."""
    return _Columns(*values)


def make_columns(tables: Tables) -> Columns:
    """Return room for the columns of any training of a problem."""
    kinds = tables.classes
    most = 2 * kinds + MAX_STAGES

    def ints(*sizes: int) -> Ints:
        return np.zeros(sizes, np.int64)

    return Columns(
        ints(most, MAX_STAGES),
        ints(most, MAX_STAGES),
        ints(most, MAX_STAGES),
        ints(most),
        ints(MAX_STAGES),
        ints(most),
        ints(most),
        ints(kinds),
        ints(kinds),
        ints(kinds),
        ints(kinds),
        ints(most),
        np.zeros(most),
        np.zeros(most),
        *np.zeros((6, MAX_STAGES)),
    )


@njit
def lay_out(task: int, devices: Any, order: Any, choice: Any, tables: Tables, columns: Columns) -> int:
    """Fill kinds, counts and places; return the number of columns, 0 where the devices do not make one replica."""
    used = 0
    for position in range(choice[USED]):
        kind = order[position]
        node, size = devices[kind], tables.per_node[kind]
        units = (node // size) * (size >> choice[TENSOR]) + ((node % size) >> choice[TENSOR])
        if units > 0 and tables.usable[task, kind]:
            columns.order[used] = kind
            columns.units[used] = units
            used += 1
    if used == 0:
        return 0
    stages = choice[PIPELINE]
    most = tables.training.samples // tables.training.micro_batches[choice[MICRO_BATCH]]
    shape = choice[SHAPE] % ALIKE
    if shape == STAGES_BY_CLASS:
        found = _stages_by_class(used, stages, most, columns)
    elif shape == WHOLE_REPLICAS:
        found = _whole_replicas(used, stages, most, columns)
    else:
        found = _replicas_by_class(used, stages, most, columns)
    _place(found, stages, choice[SHAPE] >= ALIKE, columns)
    return found


@njit
def _stages_by_class(used: int, stages: int, most: int, columns: Columns) -> int:
    """Cut the replicas where one of their stages passes from one class to the next."""
    replicas = min(columns.units[:used].sum() // stages, most)
    if replicas == 0:
        return 0
    cuts, found, end = columns.cuts, 1, 0
    cuts[0] = 0
    for position in range(used):
        end += columns.units[position]
        if end >= replicas * stages:
            break
        found = _insert(cuts, found, end % replicas)
    for q in range(found):
        following = cuts[q + 1] if q + 1 < found else replicas
        columns.replicas[q] = following - cuts[q]
        position, end = 0, columns.units[0]
        for i in range(stages):
            while end <= i * replicas + cuts[q]:
                position += 1
                end += columns.units[position]
            columns.kind[q, i] = columns.order[position]
    return found


@njit
def _insert(cuts: Any, found: int, cut: int) -> int:
    """Insert a value in ascending order unless it is there; return how many there are."""
    place = found
    while place > 0 and cuts[place - 1] > cut:
        place -= 1
    if place > 0 and cuts[place - 1] == cut:
        return found
    for index in range(found, place, -1):
        cuts[index] = cuts[index - 1]
    cuts[place] = cut
    return found + 1


@njit
def _replicas_by_class(used: int, stages: int, most: int, columns: Columns) -> int:
    """Count the replicas inside each class, and those that take the rest of one class and go on in the next."""
    replicas = min(columns.units[:used].sum() // stages, most)
    found, done, position, left = 0, 0, 0, columns.units[0]
    while done < replicas:
        inside = min(left // stages, replicas - done)
        if inside > 0:
            columns.kind[found, :stages] = columns.order[position]
            left -= inside * stages
        else:
            inside = 1
            for i in range(stages):
                while left == 0:
                    position += 1
                    left = columns.units[position]
                columns.kind[found, i] = columns.order[position]
                left -= 1
        columns.replicas[found] = inside
        done += inside
        found += 1
    return found


@njit
def _whole_replicas(used: int, stages: int, most: int, columns: Columns) -> int:
    """Count the replicas inside each class; what is left of a class stays idle."""
    found, left = 0, most
    for position in range(used):
        inside = min(columns.units[position] // stages, left)
        if inside > 0:
            columns.kind[found, :stages] = columns.order[position]
            columns.replicas[found] = inside
            left -= inside
            found += 1
    return found


@njit
def _place(found: int, stages: int, alike: bool, columns: Columns) -> None:
    """Deal the units of each class to the columns, one column after the other."""
    columns.cursor[:] = 0
    for q in range(found):
        first = 0
        while first < stages:
            kind, end = columns.kind[q, first], first + 1
            while not alike and end < stages and columns.kind[q, end] == kind:
                end += 1
            for i in range(first, end):
                columns.offset[q, i] = columns.cursor[kind] + i - first
                columns.stride[q, i] = end - first
            columns.cursor[kind] += (end - first) * columns.replicas[q]
            first = end


@njit
def split_layers(stages: int, layers: int, columns: Columns) -> bool:
    """Split the layers: the stage that would end first gets the next one, within its memory; False without room."""
    capacity, layer, beside, split, room = columns.capacity, columns.layer, columns.beside, columns.layers, 0.0
    for i in range(stages):
        if capacity[i] < 1:
            return False
        room += min(capacity[i], layers)
        split[i] = 1
    if room < layers:
        return False
    for _ in range(layers - stages):
        chosen, least = -1, np.inf
        for i in range(stages):
            ends = beside[i] + (split[i] + 1) * layer[i]
            if split[i] + 1 <= capacity[i] and ends < least:
                chosen, least = i, ends
        split[chosen] += 1
    return True


@njit
def share_samples(found: int, units: int, unit: int, columns: Columns) -> None:
    """Share the units of samples out: every replica at least one, and all end at the same time as nearly as possible.

    A replica of column q takes `start[q] + n slope[q]` seconds for n units. First the n of equal ends, rounded down;
    what is left goes to the columns that would end first, a unit to each of their replicas.
    """
    samples, extra, replicas = columns.samples, columns.extra, columns.replicas
    slope, start = columns.slope, columns.start
    samples[:found] = 0
    left, open_columns = units, found
    while True:  # columns whose part is below one unit get one, and the others share the rest anew
        rate, offset = 0.0, 0.0
        for q in range(found):
            if samples[q] == 0:
                rate += replicas[q] / slope[q]
                offset += replicas[q] * start[q] / slope[q]
        end = (left + offset) / rate
        closed = 0
        for q in range(found):
            if samples[q] == 0 and (end - start[q]) / slope[q] < 1:
                samples[q] = 1
                left -= replicas[q]
                closed += 1
        open_columns -= closed
        if closed == 0 or open_columns == 0:
            break
    for q in range(found):
        if samples[q] == 0:
            samples[q] = max(int((end - start[q]) / slope[q]), 1)
            left -= replicas[q] * samples[q]
    extra[:found] = 0
    while left > 0:
        chosen, least = 0, np.inf
        for q in range(found):
            ends = start[q] + (samples[q] + 1) * slope[q]
            if ends < least:
                chosen, least = q, ends
        given = min(left, replicas[chosen])
        left -= given
        extra[chosen] = given
        if given == replicas[chosen]:
            samples[chosen] += 1
            extra[chosen] = 0
    for q in range(found):
        samples[q] *= unit
