"""Token sequences on their way into a training engine: right-padded arrays, laid end to end in micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.layers import Packing


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


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch, right-padded to the longest and laid end to end.

    `mask` and `extras` are tensors [b, s]; `inputs` [1, t] are the real tokens one sequence after the other, then what
    fills them up; `packing` says where each begins.
    """

    mask: torch.Tensor
    extras: dict[str, torch.Tensor]
    inputs: torch.Tensor
    packing: Packing

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [1, t] of the positions of `inputs` as [b, s], zero in padding and in column 0."""
        return torch.nn.functional.pad(self.all_rows(values)[:, 1:], (1, 0))

    def all_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [1, t] of the positions of `inputs` as [b, s], zero in padding."""
        return self.packing.rows(values[0])[: self.mask.shape[0], : self.mask.shape[1]]


def cut(
    batch: TokenBatch, parts: Sequence[Sequence[int]], device: torch.device, *, multiple: int, equal: bool
) -> list[MicroBatch]:
    """Return the samples of each part as a micro-batch.

    A part without samples becomes a copy of the first sample that has no targets, and adds to no sum. All have a
    `multiple` of tokens; `equal`: as many as the longest of them, as a pipeline needs, whose stages exchange tensors of
    one shape.
    """
    rows = [(numpy.array(part), batch.mask[list(part)]) if part else _nothing(batch) for part in parts]
    totals = [int(batch.lengths[indices].sum()) for indices, _ in rows]
    widths = [max(totals)] * len(totals) if equal else totals
    return [
        _micro_batch(batch, indices, mask, -(-width // multiple) * multiple, device)
        for (indices, mask), width in zip(rows, widths, strict=True)
    ]


def _nothing(batch: TokenBatch) -> tuple[NDArray[numpy.int64], NDArray[numpy.bool_]]:
    return numpy.zeros(1, dtype=numpy.int64), numpy.zeros((1, batch.mask.shape[1]), dtype=numpy.bool_)


def _micro_batch(
    batch: TokenBatch, indices: NDArray[numpy.int64], mask: NDArray[numpy.bool_], tokens: int, device: torch.device
) -> MicroBatch:
    lengths = batch.lengths[indices]
    width, total = int(lengths.max()), int(lengths.sum())
    inputs = numpy.zeros(tokens, dtype=numpy.int64)  # what fills up is a sequence of its own, of no consequence
    inputs[:total] = batch.tokens[indices][batch.real[indices]]
    filled = [*lengths.tolist(), tokens - total] if tokens > total else lengths.tolist()
    extras = {name: torch.from_numpy(array[indices, :width]).to(device) for name, array in batch.extras.items()}
    return MicroBatch(
        mask=torch.from_numpy(mask[:, :width]).to(device),
        extras=extras,
        inputs=torch.from_numpy(inputs).unsqueeze(0).to(device),
        packing=Packing.of(filled, device),
    )
