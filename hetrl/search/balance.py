"""Divide equal units of work over unequal workers so that the last one ends as early as possible."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def balance(tables: Sequence[Sequence[float]], counts: Sequence[int], units: int, least: int = 0) -> list[list[int]]:
    """Return the units of every worker of every kind, for the least makespan.

    `tables[k][n-1]` is the time in which a worker of kind k does n units (not decreasing), `counts[k]` how many such
    workers there are. Each worker gets at least `least` units; there must be enough units for that.

    Find the earliest T by which all units can be done, sum over k of counts[k] x n_k(T) >= units; then take back what
    is too much, from the kind that would end last.
    """
    low, high = 0.0, max(table[-1] for table in tables)
    for _ in range(40):  # halvings: to a millionth of a millionth of the longest time
        middle = (low + high) / 2
        done = sum(count * max(bisect_right(table, middle), least) for table, count in zip(tables, counts, strict=True))
        low, high = (low, middle) if done >= units else (middle, high)
    shares = [[max(bisect_right(table, high), least)] * count for table, count in zip(tables, counts, strict=True)]
    surplus = sum(map(sum, shares)) - units
    while surplus > 0:
        kind = max(
            (k for k in range(len(tables)) if max(shares[k], default=0) > least),
            key=lambda k: tables[k][max(shares[k]) - 1],
        )
        worker = shares[kind].index(max(shares[kind]))
        shares[kind][worker] -= 1
        surplus -= 1
    return shares
