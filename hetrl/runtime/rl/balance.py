"""Which replica and which micro-batch each sequence of a batch goes to: equal tokens for equal speed.

Attention apart, a pass costs what its tokens cost; a pipeline waits for its largest micro-batch, a step for its last
replica. Longest first, each to whoever is least loaded: Graham's LPT rule (doi 10.1137/0117039).
"""

from __future__ import annotations

from collections.abc import Sequence


def over_replicas(lengths: Sequence[int], shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of each replica, in order: tokens in proportion to `shares`; a replica may have none."""
    loads, parts = [0.0] * len(shares), [list[int]() for _ in shares]
    for index in _longest_first(range(len(lengths)), lengths):
        taker = min(range(len(shares)), key=lambda replica: (loads[replica] + lengths[index]) / shares[replica])
        loads[taker] += lengths[index]
        parts[taker].append(index)
    return tuple(tuple(sorted(part)) for part in parts)


def micro_batches(indices: Sequence[int], lengths: Sequence[int], sequences: int) -> tuple[tuple[int, ...], ...]:
    """Return `indices` in micro-batches of `sequences` on average, at least one, with about equal tokens.

    None has more tokens than `sequences` of the longest would have: the memory that was planned for.
    """
    count = max(1, -(-len(indices) // sequences))
    bins, loads = [list[int]() for _ in range(count)], [0] * count
    most = sequences * max((lengths[index] for index in indices), default=0)
    for index in _longest_first(indices, lengths):
        taker = min(range(len(bins)), key=loads.__getitem__)
        if loads[taker] + lengths[index] > most:
            taker = len(bins)
            bins.append([])
            loads.append(0)
        bins[taker].append(index)
        loads[taker] += lengths[index]
    return tuple(tuple(sorted(one)) for one in bins)


def _longest_first(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))
