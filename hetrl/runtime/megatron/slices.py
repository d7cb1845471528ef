"""Which elements of a tensor: boxes of a whole tensor, runs of a flattened one. Numbers alone, no tensors.

An optimiser that is spread over the replicas holds a flat range of a parameter, cut anywhere. A Hugging Face tensor
lies in that parameter as runs of equal length (`Runs`), in its own order, so what a range holds of the tensor is one
flat range of it again, and that is at most three boxes: the rest of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]  # a half-open range for each dimension


@dataclass(frozen=True)
class Runs:
    """`count` runs of `size` elements in a flattened parameter: the first at `first`, `stride` from one to the next."""

    first: int
    size: int
    stride: int
    count: int

    def before(self, position: int) -> int:
        """Return how many of these elements stand ahead of a position of the parameter."""
        run, rest = divmod(max(0, position - self.first), self.stride)
        return self.count * self.size if run >= self.count else run * self.size + min(rest, self.size)

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of the runs that lie in a range of the parameter, as ranges of the parameter."""
        for run in range(self.count):
            begin = self.first + run * self.stride
            low, high = max(begin, start), min(begin + self.size, stop)
            if low < high:
                yield low, high


def boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that elements `start`..`stop` of a flattened tensor of one or two dimensions fill, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield ((start, stop),)
        return
    _, width = shape
    head, tail = -(-start // width), stop // width  # whole rows
    if head > tail:
        yield (tail, head), (start - tail * width, stop - tail * width)
        return
    if start % width:
        yield (head - 1, head), (start % width, width)
    if head < tail:
        yield (head, tail), (0, width)
    if stop % width:
        yield (tail, tail + 1), (0, stop % width)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, length) for length in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of the elements in a box."""
    return tuple(stop - start for start, stop in box)


def size_of(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(shape_of(box))


def inside(box: Box, outer: Box) -> Box:
    """Return where a box stands in the whole tensor when its ranges count from the beginning of `outer`."""
    return tuple((start + origin, stop + origin) for (start, stop), (origin, _) in zip(box, outer, strict=True))


def overlap(left: Box, right: Box) -> Box | None:
    """Return what two boxes have in common; None when that is nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return common if all(start < stop for start, stop in common) else None


def indices(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return how a tensor that holds the box `outer` is indexed to get `box`."""
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True))


def text(box: Box) -> str:
    """Write a box as Python indexes with it, `0:48, 0:64`."""
    return ", ".join(f"{start}:{stop}" for start, stop in box)


def parse(written: str) -> Box:
    """Read what `text` wrote; raises ValueError for anything else."""
    pairs = [part.split(":") for part in written.split(",")]
    return tuple((int(start), int(stop)) for start, stop in pairs)
