"""A vLLM server that is a function, and weight files for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hetrl.runtime import wire
from hetrl.runtime.vllm.server import VllmServer, VllmSettings
from hetrl.runtime.weights.digests import version_digest
from hetrl.runtime.weights.pieces import pieces
from hetrl.runtime.weights.weight_file import WeightFile

HANG_SECONDS = 0.4


class Served(VllmServer):
    """Asks a function of a route and its body in place of a server."""

    def __init__(self, path: Path, load_format: str = "auto") -> None:
        settings = VllmSettings(
            model_directory=path,
            kv_cache_bytes=2**20,
            max_sequences=4,
            max_model_tokens=8,
            load_format=load_format,
            hang_seconds=HANG_SECONDS,
        )
        super().__init__(settings, path, path / "log")
        self.asked: list[str] = []
        self.answer: Callable[[Mapping[str, Any] | None], Any] = lambda body: {}
        self.answered = ""  # by which route

    async def _call(
        self, method: str, path: str, timeout_seconds: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        self.asked.append(path)
        return {} if path != self.answered else await self.answer(body)


def weight_file(directory: Path, version: int, shape: tuple[int, ...] = (3,)) -> Path:
    """Write a version of one tensor as it arrives over the wire."""
    file, data = WeightFile(directory, 10**6), memoryview(np.full(shape, version, np.float32)).cast("B")
    file.begin(wire.WeightsBegin(version=version))
    leaves = {}
    for message, buffer in pieces(version, "a.weight", "float32", shape, data):
        piece = file.admit(message, buffer.nbytes)
        assert piece is not None
        file.write(piece, buffer)
        leaves["a.weight", message.offset] = message.digest
    end = wire.WeightsEnd(version=version, tensors=1, bytes=data.nbytes, digest=version_digest(leaves))
    return file.end(end)[0]
