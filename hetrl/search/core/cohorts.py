"""From a training's genes to cohorts: equal replicas, counted, with their places in the nodes.

A *unit* is the tensor-parallel ranks of one stage of one replica, inside one node. The units of a group's devices stand
in a chain: class by class in the training's order, whole nodes first, then the remainder. With p stages and r replicas

    stages by class     replica i takes the units i, i + r, i + 2 r, ...     a stage fills classes one after the other
    replicas by class   replica i takes the units i p .. i p + p - 1         a replica does
    whole replicas      the same, but no replica has units of two classes

A *cohort* stands for `count` replicas whose stages lie on the same classes. Inside a class its replicas follow each
other, either with the stages of one replica side by side, or with one stage of all replicas side by side (`ALIKE`):
the first keeps activations inside nodes, the second gradients. Stage i of replica r is unit `offset[i] + r stride[i]`
of its class. So the work grows with classes and stages, not with devices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hetrl.search.core.records import Floats1, Floats2, Ints1, Ints2
from hetrl.search.core.tables import MAX_STAGES, Tables


class Cohorts(NamedTuple):
    """One training's cohorts (q) of stages (i); written by the functions of cohorts.h in `cpp`."""

    kind: Ints2  # [q, i]
    offset: Ints2  # [q, i]
    stride: Ints2  # [q, i]
    replicas: Ints1  # [q] how many replicas it stands for
    samples: Ints1  # [q] of each replica but the first `extra`
    extra: Ints1  # [q] replicas that have `unit` samples more
    cuts: Ints1  # [q] the first replica of each cohort
    order: Ints1  # [c] classes of the chain
    units: Ints1  # [c] how many units each has
    cursor: Ints1  # [c] workspace: the next free unit; the node that was summed up last
    held: Ints1  # [c] workspace: the stages on that node, as bits
    hops: Ints2  # [wire x 2 + (behind, ahead), c] workspace: the hops behind and ahead of its stages
    flows: Ints2  # [wire x 4 + pass x 2 + (sending, receiving), c] on the class's busiest node; its uplink, its card
    layers: Ints1  # [i]
    slope: Floats1  # [q] seconds per unit of samples
    start: Floats1  # [q] seconds beside them
    capacity: Floats1  # [i] most layers of a stage
    layer: Floats1  # [i] seconds per layer
    beside: Floats1  # [i] seconds beside the layers
    both: Floats1  # [i] forward and backward of one micro-batch, or the forward alone
    back: Floats1  # [i] its backward, where there is one
    hop: Floats1  # [i] to the next stage
    transfer: Floats1  # [i] of that the bytes, without the delay
    load: Floats2  # [site, i] bytes that all rings of a stage send through a node there


def make_cohorts(tables: Tables) -> Cohorts:
    """Return room for the cohorts of any training of a problem."""
    most = 2 * tables.classes + MAX_STAGES  # for each class: the replicas inside it, one that goes on in the next
    return Cohorts._make(
        [
            *np.zeros((3, most, MAX_STAGES), np.int64),
            *np.zeros((4, most), np.int64),
            *np.zeros((4, tables.classes), np.int64),
            np.zeros((4, tables.classes), np.int64),
            np.zeros((8, tables.classes), np.int64),
            np.zeros(MAX_STAGES, np.int64),
            *np.zeros((2, most)),
            *np.zeros((7, MAX_STAGES)),
            np.zeros((tables.sites, MAX_STAGES)),
        ]
    )
