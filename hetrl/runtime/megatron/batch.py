"""Token sequences on their way into a training engine: right-padded arrays, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy
import torch
from numpy.typing import NDArray

from hetrl.errors import HetrlError


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """`n` right-padded sequences of at most `s` tokens.

    `tokens` int64 [n, s]; `lengths` int64 [n], each 1..s; `mask` bool [n, s], True where token j is a target (a token
    of the response; never the first, which nothing predicts, and never padding); `extras` float32 [n, s] under their
    names: advantages, old_logprobs, reference_logprobs, ... Raises HetrlError for wrong shapes, types or lengths.
    """

    tokens: NDArray[numpy.int64]
    lengths: NDArray[numpy.int64]
    mask: NDArray[numpy.bool_]
    extras: Mapping[str, NDArray[numpy.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.dtype != numpy.int64 or not self.tokens.size:
            raise HetrlError(f"batch: tokens must be int64 [n, s], got {self.tokens.dtype} {self.tokens.shape}")
        samples, width = self.tokens.shape
        if self.lengths.shape != (samples,) or self.lengths.dtype != numpy.int64:
            raise HetrlError(f"batch: lengths must be int64 [{samples}], got {self.lengths.dtype} {self.lengths.shape}")
        if self.lengths.min() < 1 or self.lengths.max() > width:
            raise HetrlError(f"batch: lengths must lie in 1..{width}")
        if self.mask.shape != self.tokens.shape or self.mask.dtype != numpy.bool_:
            raise HetrlError(f"batch: mask must be bool {self.tokens.shape}, got {self.mask.dtype} {self.mask.shape}")
        if (self.mask[:, 0] | (self.mask & ~self.real).any(axis=1)).any():
            raise HetrlError("batch: mask is set on a first token or on padding; only tokens with a prefix are targets")
        for name, array in self.extras.items():
            if array.shape != self.tokens.shape or array.dtype != numpy.float32:
                raise HetrlError(f"batch: {name} must be float32 {self.tokens.shape}, got {array.dtype} {array.shape}")

    @property
    def samples(self) -> int:
        """Return n."""
        return int(self.tokens.shape[0])

    @property
    def real(self) -> NDArray[numpy.bool_]:
        """Return bool [n, s]: True where a token is not padding."""
        return numpy.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]

    def rows(self, start: int, end: int) -> TokenBatch:
        """Return the samples of a half-open range, as views."""
        part = slice(start, end)
        extras = {name: array[part] for name, array in self.extras.items()}
        return TokenBatch(self.tokens[part], self.lengths[part], self.mask[part], extras)

    def trimmed(self) -> TokenBatch:
        """Return the batch cut to its longest sequence, as views."""
        width = int(self.lengths.max())
        extras = {name: array[:, :width] for name, array in self.extras.items()}
        return TokenBatch(self.tokens[:, :width], self.lengths, self.mask[:, :width], extras)


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
