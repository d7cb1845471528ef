"""The time between two weight versions: how the tasks of an iteration, and the iterations, follow one another.

As in `hetrl.cost.formulas`, each function is here once for Python and once, alike, in `search/cpp/cycle.h`.

In mode async iterations overlap. Their timetable repeats itself every `period`; a group takes all tasks of a batch
before those of the next one, in the order inferences, trainings. Of all orders this one has the shortest way of a
batch: its trainings start when its last inference ends, and every period that holds the tasks of each group is long
enough for it (an inference of the next batch comes behind an older training without delaying its own batch, since the
two fit into a period). What remains is generation, which runs whenever the others of its group do not. From the end of
a batch's generation on:

    0                 inference                + actor          + transfer = arrival
    | inferences of all groups | training of the actor   | weights travel | are loaded | a later batch may start
      own_inference              own_training                               pause
      generation of further batches stands still for these three, which come again a period later; while it does so for
      the first two, no version is loaded

A batch waits for the prompts that the next one may not take any more. No more are under way than the batches to come
can take, so that a batch is nearly all of those that were admitted `staleness` versions before.

Source: cyclic scheduling of a repeated task graph (Hanen and Munier, 1995); the admission rule is AReaL's (arXiv
2505.24298, section 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ROUNDS = 100  # towards a period: each is below it; half of the periods are met by the second one, few need fifty
SETTLED = 1e-12  # relative
NEAREST = 1e-3  # to the period in which samples would share all of what generation runs for


def transfer_seconds(encode: float, uplinks: float, fan_out: float) -> float:
    """Return the time of a weight version's way, whose chunks overlap: the slowest of its parts."""
    return max(encode, uplinks, fan_out)


def behind_seconds(critic: float, behind: float, lead: float) -> float:
    """Return the transfer of the critic's version, which stands still while the actor's takes what both take.

    It takes `critic` alone, and `behind` where both start at once. The actor's starts so much earlier (`lead`), or
    later where that is negative.
    """
    return critic if behind <= critic or critic + lead <= 0 else critic + max(behind - critic - max(lead, 0.0), 0.0)


def shared_transfer_seconds(actor: float, critic: float, behind: float, lead: float) -> float:
    """Return the transfer of the actor's version beside the critic's, each of which takes so long alone.

    The critic's would take `behind` if it stood still (`behind_seconds`, with the same `lead`). Where none does, each
    has an equal part of what both take, and the actor's is held up until the shorter one is through.
    """
    return actor if behind <= critic else actor + min(behind - critic, critic + min(lead, 0.0))


def yielding_seconds(alone: float, begins: Sequence[float], lasts: Sequence[float], taken: Sequence[float]) -> float:
    """Return the time of a transfer that takes `alone` on a free wire and gives way to what goes first.

    From each of `begins` on, in order and apart, others send evenly over so many seconds what takes the wire for
    `taken` of them.
    """
    left, now = alone, 0.0
    for begin, last, busy in zip(begins, lasts, taken, strict=True):
        free, rest = max(begin - now, 0.0), max(last - busy, 0.0)
        if left <= free:
            return now + left
        left, now = left - free, now + free
        if left <= rest:
            return now + left * last / rest
        left, now = left - rest, now + last
    return now + left


def settled_seconds(first: float, second: float, third: float) -> float:
    """Return where three seconds are bound for, each of which follows from the one before: Aitken's delta-squared.

    What follows falls with what it follows from, as along a line: the second is above the end, the third below it.
    Source: Aitken, Proc. Royal Society of Edinburgh 46 (1927).
    """
    return first + (second - first) * (second - first) / (2 * second - first - min(third, second))


def held_up(period: float, arrival: float, begin: float, stop: float) -> float:
    """Return for how long a version that arrives finds generation at a stop, which begins at `begin` every period."""
    phase = arrival - math.floor(arrival / period) * period
    if begin < phase + period < begin + stop:
        phase += period
    return begin + stop - phase if begin < phase < begin + stop else 0.0


def overlap(begin: float, end: float, after: float, before: float) -> float:
    """Return for how long both last: from `begin` to `end`, and from `after` to `before`."""
    return max(min(end, before) - max(begin, after), 0.0)


def running_seconds(
    period: float,
    batches: int,
    arrival: float,
    inference: float,
    own_inference: float,
    own_training: float,
    pause: float,
    refill: float,
    renewal: float,
) -> float:
    """Return for how long generation runs while a batch is under way in it.

    A batch may start with the version that another one gave: this version has its `arrival` so long after the end of
    that one's generation, and is loaded in a `pause` once generation does not stand still, with a `renewal` of
    contexts. The batch ends `batches` periods after that one. In between generation stands still for its group's tasks
    of the batches between, and until the batch ends for their pauses. The `refill` of its cache follows each stop; one
    that is followed by the next at once has none, and a version that comes during a stop no renewal behind the refill.
    """
    first = max(inference + own_training - period, 0.0)  # the older batch's training goes before
    together = own_training > 0 and own_inference == inference
    stop = own_inference + (refill if own_inference > 0 and not together else 0.0)
    later_stop = own_training + (refill if own_training > 0 else 0.0)
    wait = max(held_up(period, arrival, first, stop), held_up(period, arrival, inference, later_stop))
    loaded = pause + (0.0 if wait > refill > 0 else renewal)
    latency = arrival + wait + loaded
    end = batches * period
    found = end - latency
    for batch in range(batches):
        begins = batch * period
        # A stop that begins ahead of the end counts whole: what varies would move the batch's last sample into it.
        found -= overlap(begins + first, begins + first + stop, latency, math.inf)
        found -= overlap(begins + inference, begins + inference + later_stop, latency, math.inf)
        found -= overlap(begins + latency - loaded, begins + latency, latency, end)
    return found


def evenness(period: float, regular: float) -> float:
    """Return how evenly batches follow each other, 0 to 1: the share of a period that is taken in the busiest queue.

    Where a group's tasks or the transfers of versions take all of a period (`regular`), they let one batch pass in
    each; where everything waits for generation, nothing keeps batches from coming in pairs.
    """
    return min(regular / period, 1.0)


def others_share(even: float, batches: int) -> float:
    """Return how many batches more are decoded beside a batch per period that it is in generation.

    Of `batches` = 1 + s under way, one that is in generation for W finds there, itself included,
        W / P                      where they come evenly (Little's law)
        1 + s / (1 + s) x (W / P)  where they come at random: itself, and as many of the s others as are there without
                                   it (the arrival theorem: Reiser and Lavenberg, J. ACM 27(2), 1980)
    """
    return even + (1 - even) * (batches - 1) / batches


def batch_seconds(
    period: float,
    stopped: float,
    regular: float,
    batches: int,
    whole: float,
    alone: float,
    shared: float,
    queued: float,
) -> float:
    """Return for how long a batch is in generation that runs, until its last sample is complete.

    The W of W = alone + shared x (batches that are decoded, itself included, of which there are more the longer it
    takes: `others_share`); then of `queued` as much as is left of the batch before when this one comes. Never less than
    `whole`. Generation runs for `period` - `stopped` of a period, which is more than `shared`.
    """
    even, running = evenness(period, regular), period - stopped
    found = (alone + shared * (1 - even)) / (1 - shared * others_share(even, batches) / running)
    return max(whole, found + queued * max(1 - running / found, 0.0))


def least_period(
    least: float,
    regular: float,
    stopped: float,
    batches: int,
    arrival: float,
    inference: float,
    own_inference: float,
    own_training: float,
    pause: float,
    refill: float,
    renewal: float,
    whole: float,
    alone: float,
    shared: float,
    queued: float,
) -> float:
    """Return the least period, from `least` on, in which a batch is generated: running_seconds >= batch_seconds.

    With a second more the difference of the two grows by no more than `batches` + (1 + queued / r) W k / (r (r - k)) +
    queued / r, with r what generation runs of a period and k what the others share, so that no step passes the least
    period; but for where a version comes to arrive just ahead of a stop instead of in it, which no step passes either.
    """
    period = max(least, stopped + shared * (1 + NEAREST))
    for _ in range(ROUNDS):
        running = running_seconds(
            period, batches, arrival, inference, own_inference, own_training, pause, refill, renewal
        )
        needed = batch_seconds(period, stopped, regular, batches, whole, alone, shared, queued)
        if needed - running <= SETTLED * period:
            break
        own, others = period - stopped, shared * others_share(evenness(period, regular), batches)
        steep = (1 + queued / own) * needed * others / (own * (own - others)) + queued / own if needed > whole else 0.0
        following = period + (needed - running) / (batches + steep)
        cycles = math.floor((arrival - inference) / following)
        ahead = (arrival - inference) / max(cycles, 1) * (1 + SETTLED)
        period = ahead if cycles >= 1 and period < ahead < following else following
    return period


def iteration_seconds(
    generation: float,
    inferences: Sequence[float],
    trainings: Sequence[float],
    own: int,
    rollouts: Sequence[float],
    actor: float,
    transfer: float,
    pause: float,
    critic: float,
    valuing: float,
    links: float,
    staleness: int,
) -> float:
    """Return the time between two weight versions, from the seconds of each group; group `own` generates.

    From the end of the inferences on the actor is trained for `actor`; then its weights travel for `transfer` and are
    loaded in `pause`, in mode async followed by the renewal of contexts; the critic's are there after `critic` (0: no
    critic), and its inference takes `valuing`. `rollouts` are the fields of `hetrl.cost.generation.ReplicaSeconds`, in
    order.

    sync:  the longest of
           T_gen + max_g sum inferences + max(actor + transfer, own sum trainings) + pause    the actor's weights
           critic + valuing                                                                   the critic's
           max_g (sum inferences + sum trainings)                                             the devices of a group
           links                                                                              what they cross
    async: the least period that is no shorter than any group's tasks (with the pause of a version where it generates),
           than a version's transfer, or than what crosses the busiest link or the critic's transfer (`links`), since
           versions follow one another; in which 1 + staleness batches pass the critic's training, weights and
           inference; and in which generation runs, besides, until a batch's last sample is complete (`least_period`).

    Staleness 0 is sync. Source: HetRL (arXiv 2512.12476) section 3, and the timetable above.
    """
    inference = max(inferences)
    busiest = max(one + other for one, other in zip(inferences, trainings, strict=True))
    if staleness == 0:
        served = max(actor + transfer, trainings[own]) + pause
        return max(generation + inference + served, critic + valuing, busiest, links)
    if not math.isfinite(busiest + transfer + critic):
        return math.inf
    whole, busy, alone, shared, queued, refill, renewal = rollouts
    own_inference, own_training, batches = inferences[own], trainings[own], 1 + staleness
    together = own_training > 0 and own_inference == inference
    stops = (own_inference > 0 and not together) + (own_training > 0)
    stopped = own_inference + own_training + pause + renewal + stops * refill
    regular = max(transfer, busiest)
    least = max(max(generation, busy) + stopped, regular, links)
    least = max(least, generation + own_inference + own_training, (critic + valuing) / batches)
    arrival = inference + actor + transfer
    way = (stopped, batches, arrival, inference, own_inference, own_training, pause, refill, renewal)
    return least_period(least, regular, *way, whole, alone, shared, queued)
