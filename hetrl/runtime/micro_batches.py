"""Cut a replica's share of a batch into micro-batches of one shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from hetrl.runtime.batch import TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """Tensors [b, s] of one micro-batch; `mask` is False in rows that only fill the shape."""

    tokens: torch.Tensor
    mask: torch.Tensor
    extras: dict[str, torch.Tensor]


def cut(batch: TokenBatch, share: range, micro_batch: int, device: torch.device) -> list[MicroBatch]:
    """Return the samples of `share` in micro-batches of equal shape, at least one.

    A pipeline exchanges tensors of one shape, so the last micro-batch is filled up with copies of the first sample
    that have no targets; a replica without samples runs one such copy. Neither adds to any sum.
    """
    width = min(micro_batch, max(1, len(share)))
    count = max(1, -(-len(share) // width))
    fill = count * width - len(share)
    rows = numpy.concatenate([numpy.arange(share.start, share.stop), numpy.zeros(fill, dtype=numpy.int64)])
    mask = batch.mask[rows]
    mask[len(share) :] = False
    arrays = {"tokens": batch.tokens[rows], "mask": mask}
    arrays |= {name: array[rows] for name, array in batch.extras.items()}
    tensors = {name: torch.split(torch.from_numpy(array).to(device), width) for name, array in arrays.items()}
    return [
        MicroBatch(tensors["tokens"][i], tensors["mask"][i], {name: tensors[name][i] for name in batch.extras})
        for i in range(count)
    ]
