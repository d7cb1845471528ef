"""The bits of the version that a trainer published last, and who has them: what the next one is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy
from numpy.typing import NDArray

from hetrl.runtime import wire
from hetrl.runtime.weights.pieces import word_bytes


@dataclass
class Kept:
    """One copy of the weights in host memory; without a `version` it is none, or half of one.

    `tensors` are raw bytes, `pieces` the messages that they go in, by tensor and offset; `holders` are the members that
    proved the version.
    """

    version: int | None = None
    digest: str = ""
    tensors: dict[str, NDArray[numpy.uint8]] = field(default_factory=dict)
    pieces: dict[tuple[str, int], wire.WeightsTensor] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)

    def room_for(self, spec: wire.TensorSpec) -> tuple[NDArray[numpy.uint8], bool]:
        """Return the bytes that are kept of a tensor, and whether they are those of the last version."""
        held = self.tensors.get(spec.name)
        if held is not None and held.nbytes == spec.bytes:
            return held, True
        self.tensors[spec.name] = numpy.zeros(spec.bytes, numpy.uint8)
        return self.tensors[spec.name], False

    def whole(self, message: wire.WeightsTensor) -> memoryview:
        """Return the bytes of a piece."""
        data: memoryview = self.tensors[message.tensor.name][message.offset : message.offset + message.bytes].data
        return data


def words(data: NDArray[Any], spec: wire.TensorSpec) -> NDArray[Any]:
    """Return bytes as the words of a tensor."""
    return data.view(f"<u{word_bytes(spec)}")
