"""The cost model's formulas of numbers: each is here once for Python and once, alike, in `search/cpp/formulas.h`.

The other modules of `hetrl.cost` find the numbers in a plan and a topology, the search finds the same ones in its
tables. Both files define the same functions in the same order with the same arguments; `tests/search/test_formulas.py`
holds each pair against each other. A `list[int]` that is returned here is written into a last argument there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

HOUR = 3600.0  # seconds
ROUNDING = 1e-9  # relative excess that is none
TIE = 1e-6  # price of a second: of plans that cost the same, or nothing, the faster one is better


def window_seconds(
    trip: float,
    stages: int,
    slowest: float,
    slowest_forward: float,
    slowest_back: float,
    alone: int,
    rest: float,
    micro_batches: int,
) -> float:
    """Return the time of the micro-batches behind the first one in a window of n stages of a 1F1B pipeline.

    c trip + (m-1-a - c n) min(slowest, trip / n) + a slowest_back + max(a slowest_forward - rest, 0)
        with a = min(`alone`, m-1) and c = floor((m-1-a) / n)
    n micro-batches follow the first for each round trip (`trip`) of the window. Its last stage begins with a forwards,
    which may take longer than the first of them takes to come back over the `rest`, and has no forward left beside its
    last a backwards.
    """
    apart = min(alone, micro_batches - 1)
    trips, left = divmod(micro_batches - 1 - apart, stages)
    begin = max(apart * slowest_forward - rest, 0.0)
    return trips * trip + left * min(slowest, trip / stages) + apart * slowest_back + begin


def following_seconds(
    both: Sequence[float],
    back: Sequence[float],
    hops: Sequence[float],
    transfers: Sequence[float],
    micro_batches: int,
) -> float:
    """Return what the micro-batches behind the first one add to an unequal 1F1B pipeline whose hops may cross sites.

    the longest, over windows [i..j] of stages, of `window_seconds`, with `alone` the stages behind j and `rest` all
    that is behind it
    `both` is f+b of each stage, `back` its b alone, `hops` the hop behind it (0 behind the last), `transfers` its
    bytes / beta alone, which counts among the f, b and f+b of a window. The round trip of a window of consecutive
    stages is their f+b and twice the hops between them. Strict 1F1B lets stage i run j-i micro-batches further ahead of
    their backwards than stage j: a forward that goes from i to j and comes back as a backward is followed at stage i by
    the forward j-i+1 micro-batches later. Windows of one stage are the slowest stage; longer ones bind over slow links.
    Source: 1F1B (PipeDream-flush, arXiv 2006.09503) with unequal stages, as paths through its event graph, of which
    these are nearly the longest; `hetrl.simulator` plays the same schedule.
    """
    found, stages = 0.0, len(both)
    rest = [sum(both[stage + 1 :]) + 2 * sum(hops[stage:]) for stage in range(stages)]
    for first in range(stages):
        round_trip = slowest = slowest_forward = slowest_back = 0.0
        for last in range(first, stages):
            count = last - first + 1
            wire = transfers[last - 1] if last > first else 0.0
            slowest = max(slowest, both[last], wire)
            slowest_forward = max(slowest_forward, both[last] - back[last], wire)
            slowest_back = max(slowest_back, back[last], wire)
            trip, alone, behind = round_trip + both[last], stages - 1 - last, rest[last]
            seconds = window_seconds(trip, count, slowest, slowest_forward, slowest_back, alone, behind, micro_batches)
            found = max(found, seconds)
            round_trip += both[last] + 2 * hops[last]
    return found


def pipeline_seconds(
    both: Sequence[float],
    back: Sequence[float],
    hops: Sequence[float],
    transfers: Sequence[float],
    micro_batches: int,
) -> float:
    """Return the time of m micro-batches through an unequal 1F1B pipeline: sum (f+b)_i + 2 sum hops + the others'."""
    filling = sum(stage + 2 * hop for stage, hop in zip(both, hops, strict=True))
    return filling + following_seconds(both, back, hops, transfers, micro_batches)


def overlapped(products: float, memory: float) -> float:
    """Return the time of kernels that compute for `products` and read for `memory` seconds: sqrt(a^2 + b^2).

    A roofline is max(a, b); where both are alike neither hides wholly behind the other. The root of squares meets the
    linear operators of a layer between one token and 4096 (Vidur's profile tables) within 10 %, the maximum misses
    the crossing by 27 %.
    """
    return math.sqrt(products * products + memory * memory)


def forward_seconds(
    forward: Sequence[float],
    hops: Sequence[float],
    transfers: Sequence[float],
    micro_batches: int,
    call: float,
) -> float:
    """Return the time of m micro-batches, forward only, through stages: m max(f_i, hop bytes / beta) + the rest.

    `call` and what is left of sum f_i + sum hops, which the stages beside the slowest add (a proportionate flow shop:
    Pinedo, Scheduling, section 6.1). `hops` are those behind the stages, with their delays, `transfers` their
    bytes / beta alone; 0 behind the last.
    """
    filling, period = 0.0, 0.0
    for stage, hop, transfer in zip(forward, hops, transfers, strict=True):
        filling += stage + hop
        period = max(period, stage, transfer)
    rest = filling - period if filling > period else 0.0  # over a missing link both are infinite
    return call + micro_batches * period + rest


def micro_batch_count(samples: float, per_sample: float) -> int:
    """Return in how many micro-batches a replica's samples pass, `per_sample` each."""
    return max(1, math.ceil(samples * per_sample * (1 - ROUNDING)))


def micro_batch_tokens(tokens: float, micro_batches: int, stages: int, fullest: float) -> float:
    """Return the tokens that a micro-batch takes the time of; those of a pipeline are filled up to the fullest one.

    `fullest` is that of the fullest one over the mean.
    """
    return tokens / micro_batches * (fullest if stages > 1 and micro_batches > 1 else 1.0)


def uneven(longest: float, tokens: float) -> float:
    """Return how much longer replicas take than with equal tokens: the largest has `tokens`, or the longest sequence.

    Source: Graham's bounds of a schedule (doi 10.1137/0117039), the mean and the longest job.
    """
    return max(1.0, longest / tokens)


def split_layers(layer: Sequence[float], beside: Sequence[float], capacity: Sequence[float], layers: int) -> list[int]:
    """Return the layers of each stage: the stage that would end first gets the next one, while it has room.

    A stage takes `beside` + n `layer` seconds for n layers and holds `capacity` of them, at least one. Empty where the
    stages do not hold all layers.
    """
    if min(capacity) < 1 or sum(min(most, layers) for most in capacity) < layers:
        return []
    split = [1] * len(layer)
    for _ in range(layers - len(layer)):
        with_room = [i for i in range(len(layer)) if split[i] + 1 <= capacity[i]]
        split[min(with_room, key=lambda i: beside[i] + (split[i] + 1) * layer[i])] += 1
    return split


def ring_reduce_bytes(ranks: int, gradient: float, sharded: bool) -> float:
    """Return the bytes that each of n ranks sends in a reduction: (n-1)/n of the gradient, and again to gather it.

    Source: ring bounds of Thakur et al., IJHPCA 2005. A sharded optimiser gathers parameters (`ring_gather_bytes`).
    """
    return (ranks - 1) / ranks * gradient * (1 if sharded else 2)


def ring_gather_bytes(ranks: int, parameters: float, sharded: bool) -> float:
    """Return the bytes of parameters that each of n ranks sends behind the update: (n-1)/n of them (as above)."""
    return (ranks - 1) / ranks * parameters if sharded else 0.0


def wan_reduce_bytes(receivers: int, ranks: int, sites: int, gradient: float, sharded: bool) -> float:
    """Return the bytes of gradient that a site sends another one, where so many of the ranks are `receivers`.

    Each site sums first. A sharded optimiser reduce-scatters: the shares of the receivers go to their site. Else s
    sites all-reduce: every site sends each other one its sum of what that one adds up, an s-th, and the total of its
    own; with two sites the whole gradient goes once each way, 33 GB for 8B in fp32. That is what
    `hetrl.runtime.wan.reduce_scatter` and `hetrl.runtime.wan.all_reduce` do.
    """
    if sharded:
        return gradient * receivers / ranks
    return 2 * gradient / sites


def wan_gather_bytes(senders: int, ranks: int, parameters: float, sharded: bool) -> float:
    """Return the bytes of parameters that a site with so many of the ranks sends each other one behind the update."""
    return parameters * senders / ranks if sharded else 0.0


def ring_latency(members: Sequence[int], delays: Sequence[float], between: float) -> float:
    """Return 2 (n-1) alpha for the ranks of the largest site, and 2 alpha for sites, which exchange all with all.

    Each site has so many `members` with its delay between them; `between` is the largest delay between sites. The unit
    is that of the delays.
    """
    local = max(2 * (count - 1) * delay for count, delay in zip(members, delays, strict=True))
    return local + (2 * between if len(members) > 1 else 0.0)


def rings_seconds(lanes: float, interfaces: float, links: float, latency: float) -> float:
    """Return the time of all rings, which run at the same time: the slowest of their edges, and the latency."""
    return max(lanes, interfaces, links) + latency


def exposed_seconds(reduction: float, backward: float, buckets: float) -> float:
    """Return what is left of a reduction behind the last backward pass, of so many seconds, that makes the gradients.

    They come bucket by bucket, and all but the last one are reduced beside it (Megatron-core, DistributedDataParallel
    with overlap_grad_reduce).
    """
    return max(reduction / buckets, reduction - backward * (1 - 1 / buckets))


def shared_seconds(first: float, slowed: float, alone: float) -> float:
    """Return the time of a task that shares a link, which takes `slowed`, until another one has ended at `first`.

    Of its work first / slowed is done by then; the rest has the link to itself.
    """
    return slowed if slowed <= first else first + (1 - first / slowed) * alone


def bucket_count(parameters: float, replicas: int) -> float:
    """Return how many buckets the gradients of a rank make: of 40 million parameters, or of a million per replica.

    Source: Megatron-core, DistributedDataParallel, the default of bucket_size.
    """
    return max(1.0, parameters / max(40e6, 1e6 * replicas))


def steady_seconds(units: Sequence[int], busy: Sequence[float]) -> float:
    """Return in which time servers do all units together, each of which is `busy` so long with its own.

    sum of units / sum over servers of (units / busy): one that is ahead is given the next units.
    """
    return sum(units) / sum(count / seconds for count, seconds in zip(units, busy, strict=True))


def interface_bytes(total: float, held: float, generates: bool, copies: int) -> float:
    """Return the bytes of a weight version that pass a node's interface in one direction.

    A node that uses weights receives what it does not hold itself; a node with weights sends so many copies of them.
    """
    return max(total - held if generates else 0.0, held * copies)


def deal_remainders(remainders: Sequence[int], size: int, nodes: int) -> list[int]:
    """Return the node, of so many of this size, that each group's remainder is dealt to: -1 without one, or room.

    A remainder is what a group has of a class beyond whole nodes. The largest goes first, each into the first node with
    room.
    """
    found, rooms = [-1] * len(remainders), [size] * nodes
    for group in sorted(range(len(remainders)), key=lambda group: (-remainders[group], group)):
        if remainders[group] == 0:
            break  # so have all that are left
        place = next((place for place, room in enumerate(rooms) if room >= remainders[group]), -1)
        if place >= 0:
            rooms[place] -= remainders[group]
            found[group] = place
    return found


def held_devices(used: int, nodes: int, size: int, whole_nodes: bool) -> int:
    """Return how many devices jobs hold that use so many on so many nodes of this size.

    Where nodes are granted as a whole, the rest of each is held, and paid for, too.
    """
    return nodes * size if whole_nodes else used


def price_per_hour(held: Sequence[int], prices: Sequence[float]) -> float:
    """Return the price of an hour of all held devices, from their numbers and the price of a device and hour each."""
    return float(sum(count * price for count, price in zip(held, prices, strict=True)))


def price_of(per_hour: float, seconds: float) -> float:
    """Return the price of so many seconds."""
    return per_hour * seconds / HOUR


def price_value(per_hour: float, seconds: float) -> float:
    """Return the price of an iteration, with `TIE` for each second: what is to be least where price is."""
    return price_of(per_hour, seconds) + TIE * seconds


def result_seconds(latest: float, steps: int, seconds: float) -> float:
    """Return the time from the submission to the end of the last step, from when the latest site starts."""
    return latest + steps * seconds


def gpu_hours(held: int, start: float, end: float) -> float:
    """Return the GPU-hours of so many devices from start to end, both in seconds."""
    return held * (end - start) / HOUR


def share_beyond(found: float, limit: float) -> float:
    """Return by what share of the limit something is above it, 0 where it keeps it."""
    return max(found / limit * (1 - ROUNDING) - 1, 0.0)
