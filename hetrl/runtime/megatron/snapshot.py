"""The bytes of a safetensors file in host memory, taken from tensors that go on changing, and their way to the disk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

CHUNK_BYTES = 2**26  # a power of two: torch's pinned memory comes in those
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


class Snapshot:
    """Tensors as they were when they were added, laid end to end in chunks of host memory (pinned beside a GPU).

    Copies from a GPU go on while the next tensors are added: synchronise the device before the bytes are read.
    Layout of the file: https://github.com/huggingface/safetensors ("Format").
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._size = 0
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers loads no file without it

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor: float32, bfloat16 or uint8."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        offsets = (self._size, self._size + data.numel())
        self._header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": tuple(tensor.shape), "data_offsets": offsets}
        while data.numel():
            used = self._size % CHUNK_BYTES
            if used == 0:
                self._chunks.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            part, data = data[: CHUNK_BYTES - used], data[CHUNK_BYTES - used :]
            self._chunks[-1][used : used + part.numel()].copy_(part, non_blocking=True)
            self._size += part.numel()

    def parts(self) -> Iterator[torch.Tensor]:
        """Yield the bytes of the file in order, at most CHUNK_BYTES at once (uint8)."""
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        for number, chunk in enumerate(self._chunks):
            yield chunk[: self._size - number * CHUNK_BYTES]


def write_parts(path: Path, parts: Iterable[torch.Tensor]) -> None:
    """Write bytes (uint8 on the CPU) to a file as they come, and sync it; an OSError names the file."""
    try:
        with path.open("wb") as file:
            for part in parts:
                file.write(part.numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # as of a full disk
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


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
