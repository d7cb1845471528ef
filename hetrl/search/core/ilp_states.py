"""States: what a set of tasks on one allotment costs and needs, with every choice of options worth keeping.

    states of no task = one state, all numbers 0
    for each set of tasks S, smaller ones first
        for each state of S without its last task, each option of the last task
            add their numbers; keep it if memory fits, it may beat the limit, and no kept state is nowhere worse

A state cannot beat the limit if its phases, with those of the fastest options that the other tasks have in the group
or on the devices left, take longer.

An option's *numbers*, and a state's, are seconds, then blocks of one number per device class:

    GENERATION, INFERENCES, TRAINING    seconds of the phases on the way from weights to weights of the actor
    CRITIC      of the critic's training, which its devices and VALUES alone wait for
    CHAIN       of generation in mode async: from a batch's admission to its last sample, at least
    TRANSFER    of a version's way inside a group that trains the actor and generates
    VALUES      of the critic's inference, as under INFERENCES
    RESIDENT_GB, ACTIVE_GB, HOST_GB     what the tasks keep, what the active one needs beside it, host memory
    APART, TOGETHER                     seconds of a version's way to rollouts on the class: another group's, its own
    RUNS                                1 where generation runs on the class
"""

from __future__ import annotations

from typing import NamedTuple

from hetrl.search.core.records import Floats1, Ints1

GENERATION, INFERENCES, TRAINING, CRITIC, CHAIN, TRANSFER, VALUES = range(7)
RESIDENT_GB, ACTIVE_GB, HOST_GB, APART, TOGETHER, RUNS = range(6)
SECONDS, BLOCKS = 7, 6


class Fixed(NamedTuple):
    """What does not change from allotment to allotment; tasks in the order in which they are added."""

    phase: Ints1  # [task] GENERATION, INFERENCES, TRAINING or CRITIC
    generation: int
    trainer: int
    classes: int
    staleness: int
    usable_gb: Floats1  # [class]
    node_gb: Floats1  # [class] a device's part
    limit: float  # seconds


def at(block: int, kind: int, classes: int) -> int:
    """Return the place of a class in a block of an option's numbers."""
    return SECONDS + block * classes + kind
