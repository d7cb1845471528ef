"""Which replica and which micro-batch each sequence of a batch goes to: equal tokens for equal speed.

Attention apart, a pass costs what its tokens cost; a pipeline waits for its largest micro-batch, a step for its last
replica. Longest first, each to whoever is least loaded: Graham's LPT rule (doi 10.1137/0117039).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heapreplace


def over_replicas(lengths: Sequence[int], shares: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of each replica, in order: tokens in proportion to `shares`; a replica may have none."""
    least: dict[int, list[tuple[int, int]]] = {}  # of the replicas with one share: tokens, replica
    for replica, share in enumerate(shares):
        least.setdefault(share, []).append((0, replica))
    parts = [list[int]() for _ in shares]

    def end(share: int, length: int) -> tuple[float, int]:
        tokens, replica = least[share][0]
        return (tokens + length) / share, replica

    for index in _longest_first(range(len(lengths)), lengths):
        taken = least[min(least, key=lambda share: end(share, lengths[index]))]
        tokens, replica = taken[0]
        heapreplace(taken, (tokens + lengths[index], replica))
        parts[replica].append(index)
    return tuple(tuple(sorted(part)) for part in parts)


def micro_batches(indices: Sequence[int], lengths: Sequence[int], sequences: int) -> tuple[tuple[int, ...], ...]:
    """Return `indices` in micro-batches with about equal tokens, at least one.

    There are as many as hold `sequences` each, on average, and no more than would be as long as the longest sequence:
    others could only be shorter, and a pipeline fills all up to the longest. None has more tokens than `sequences` of
    the longest would have: the memory that was planned for.
    """
    longest = max((lengths[index] for index in indices), default=1)
    planned, filled = -(-len(indices) // sequences), -(-sum(lengths[index] for index in indices) // longest)
    least = [(0, number) for number in range(max(1, min(planned, filled)))]
    parts = [list[int]() for _ in least]
    for index in _longest_first(indices, lengths):
        tokens, number = least[0]
        if tokens + lengths[index] <= sequences * longest:
            heapreplace(least, (tokens + lengths[index], number))
        else:
            number = len(parts)
            parts.append([])
            heappush(least, (lengths[index], number))
        parts[number].append(index)
    return tuple(tuple(sorted(part)) for part in parts)


def _longest_first(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))
