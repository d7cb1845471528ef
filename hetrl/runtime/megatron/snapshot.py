"""Bytes of tensors in host memory: to come back later, or as a safetensors file on its way to the disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from hetrl.runtime.checkpoints.writing import write

# A power of two: what torch's allocator of pinned memory rounds up to (aten/src/ATen/core/CachingHostAllocator.h).
CHUNK_BYTES = 2**26
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


class HostBytes:
    """Bytes laid end to end in chunks of host memory, which is pinned beside a GPU.

    Copies to and from a GPU go on while the next ones begin: synchronise the device before anybody reads the bytes.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self.size = 0

    @property
    def held_bytes(self) -> int:
        """Return what the chunks take."""
        return len(self._chunks) * CHUNK_BYTES

    def add(self, data: torch.Tensor) -> None:
        """Copy flat bytes (uint8) behind those that are there."""
        start = self.size
        self.size += data.numel()
        while len(self._chunks) * CHUNK_BYTES < self.size:
            self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        self.put(data, start)

    def put(self, data: torch.Tensor, start: int) -> None:
        """Copy flat bytes (uint8) over those from `start` on."""
        for place, part in self._places(start, start + data.numel()):
            part.copy_(data[place : place + part.numel()], non_blocking=True)

    def copy_to(self, data: torch.Tensor, start: int) -> None:
        """Copy the bytes from `start` on into a flat tensor (uint8), as many as it has."""
        for place, part in self._places(start, start + data.numel()):
            data[place : place + part.numel()].copy_(part, non_blocking=True)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield all bytes in order, at most a chunk at once."""
        yield from (part for _, part in self._places(0, self.size))

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the parts of chunks that hold the bytes of a range, and how far each is from its beginning."""
        at = start
        while at < stop:
            number, offset = divmod(at, CHUNK_BYTES)
            part = self._chunks[number][offset : offset + stop - at]
            yield at - start, part
            at += part.numel()


class Snapshot:
    """Tensors as they were when they were added, as a safetensors file; see `HostBytes`.

    Layout of the file: https://github.com/huggingface/safetensors ("Format").
    """

    def __init__(self) -> None:
        self._bytes = HostBytes()
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers loads no file without it

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor: float32, bfloat16 or uint8."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        offsets = (self._bytes.size, self._bytes.size + data.numel())
        self._header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tuple(tensor.shape), "data_offsets": offsets}
        self._bytes.add(data)

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of the file in order, at most CHUNK_BYTES at once (uint8)."""
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        yield from self._bytes.parts()


def write_parts(path: Path, parts: Iterable[torch.Tensor]) -> None:
    """Write bytes (uint8 on the CPU) to a file of a checkpoint; an OSError names it."""
    write(path, (part.numpy().data for part in parts))


class Background:
    """Work in a thread of its own, which dies with the process; `failure` is what it raised, when it is `done`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.failure: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.failure = error

    @property
    def done(self) -> bool:
        """Return whether the work has ended."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until the work has ended."""
        self._thread.join()
