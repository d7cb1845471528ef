"""Token sequences on their way into a training engine: right-padded numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy
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
