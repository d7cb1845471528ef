"""Weights that an emulated trainer publishes: made-up numbers, of which some differ from version to version."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
from numpy.typing import NDArray

CHANGED = 0.012  # of bf16 weights between two versions (docs/decisions.md, "Changed words travel as gaps and steps")
LEAST_BYTES = 4096
_WORD_BYTES = 2

Words = NDArray[numpy.int16]


class Weights:
    """As many tensors as a model has layers, of so many bytes together."""

    def __init__(self, layers: int, total_bytes: float, seed: int) -> None:
        """The same seed makes the same weights."""
        self._draws = numpy.random.default_rng(seed)
        words = max(int(max(total_bytes, LEAST_BYTES) / _WORD_BYTES / layers), 1)
        names = [f"model.layers.{index}.weight" for index in range(layers)]
        self._tensors = {name: self._draws.integers(-(2**15), 2**15, words, numpy.int16) for name in names}

    @property
    def size_bytes(self) -> int:
        """Return the bytes of a full set."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def tensors(self) -> Iterator[tuple[str, Words]]:
        """Yield each tensor with its name."""
        yield from self._tensors.items()

    def change(self) -> None:
        """Move some numbers to their neighbours, as the optimiser steps between two versions do."""
        for tensor in self._tensors.values():
            places = self._draws.integers(0, tensor.size, max(int(tensor.size * CHANGED), 1))
            tensor[places] += self._draws.choice(numpy.array([-1, 1], numpy.int16), places.size)
