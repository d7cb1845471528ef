"""Cut a replica's share of a batch into micro-batches of one shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from hetrl.runtime.megatron.batch import TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """Tensors [b, s] of one micro-batch; `mask` is False in rows that only fill the shape.

    `inputs` is what the model computes: `tokens` themselves, or [1, t], their `real` ones end to end (`real` bool
    [b, s]; None where they are not packed).
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    extras: dict[str, torch.Tensor]
    inputs: torch.Tensor
    real: torch.Tensor | None

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the positions of `inputs` as [b, s], zero in padding and in column 0."""
        if self.real is None:
            return values
        rows = torch.zeros(self.tokens.shape, dtype=values.dtype, device=values.device)
        rows = rows.masked_scatter(self.real, values)
        return torch.nn.functional.pad(rows[:, 1:], (1, 0))


def cut(batch: TokenBatch, share: range, micro_batch: int, device: torch.device, packed: bool) -> list[MicroBatch]:
    """Return the samples of `share` in micro-batches, at least one.

    A pipeline exchanges padded tensors of one shape, so the last micro-batch is filled up with copies of the first
    sample that have no targets; a replica without samples runs one such copy. Neither adds to any sum. Packed
    micro-batches may differ in length and are not filled up.
    """
    width = min(micro_batch, max(1, len(share)))
    count = max(1, -(-len(share) // width))
    fill = count * width - len(share) if not packed or not share else 0
    rows = numpy.concatenate([numpy.arange(share.start, share.stop), numpy.zeros(fill, dtype=numpy.int64)])
    mask = batch.mask[rows]
    mask[len(share) :] = False
    arrays = {"tokens": batch.tokens[rows], "mask": mask, "real": batch.real[rows]}
    arrays |= {name: array[rows] for name, array in batch.extras.items()}
    tensors = {name: torch.split(torch.from_numpy(array).to(device), width) for name, array in arrays.items()}
    return [_micro_batch({name: parts[i] for name, parts in tensors.items()}, packed) for i in range(count)]


def _micro_batch(tensors: dict[str, torch.Tensor], packed: bool) -> MicroBatch:
    tokens, mask, real = (tensors.pop(name) for name in ("tokens", "mask", "real"))
    inputs = tokens[real].unsqueeze(0) if packed else tokens
    return MicroBatch(tokens, mask, tensors, inputs, real if packed else None)
