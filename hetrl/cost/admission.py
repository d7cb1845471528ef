"""The time between two versions where generation runs ahead: how much the rule of admission lets be under way.

    start prompts while (max_staleness + version + 1) x batch - (accepted + running) > 0; train on the oldest complete
    ones                                                              (AReaL, arXiv 2505.24298, section 5.1)

With staleness s, 1 + s batches are under way. Over a period P between versions, generation runs for G = P - stopped;
of what a batch passes outside of it (`rest`) the part rest x G / P falls into that. A batch has way(G) = (1 + s) G -
rest x G / P to be generated in. The least G, at least `busy`, that suffices for one of:

    way(G) >= last              its samples, at the speed that they have with those of other batches
    way(G) - h G >= prompt      the samples of one prompt, and what they wait until their batch is full: half a period
                                without the last of n prompts' own, h = (1 - 1/n) / 2, where batches fill up with
                                whatever ends first (Little's law)
    min(way(G), G) >= whole     its samples alone, where a batch has ended before the next one starts

Prompts that end too late to be trained on are drawn again; that is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetrl.cost.generation import ReplicaSeconds
from hetrl.workload import Workload


@dataclass(frozen=True)
class Stations:
    """What generation shares its time with, in seconds per iteration.

    Generation cannot run while `stopped`; `rest` is what a batch passes outside generation while it can run.
    """

    stopped: float
    rest: float


def period_seconds(generation: ReplicaSeconds, others: Stations, workload: Workload) -> float:
    """Return the shortest time between two versions that the rule of admission sustains."""
    ways = 1 + workload.staleness
    waiting = (1 - workload.samples_per_prompt / workload.samples) / 2
    running = min(
        _least_running(ways, generation.last, others),
        _least_running(ways - waiting, generation.prompt, others),
        max(_least_running(ways, generation.whole, others), generation.whole),
    )
    return others.stopped + max(running, generation.busy)


def _least_running(ways: float, needed: float, others: Stations) -> float:
    """Return the least G with ways x G - rest x G / (G + stopped) = needed: the root of a quadratic equation."""
    linear = ways * others.stopped - others.rest - needed
    return (math.sqrt(linear * linear + 4 * ways * needed * others.stopped) - linear) / (2 * ways)
