"""The tensors of a weight file (`safetensors_file`), on the device of the worker that wants them.

on a CPU    views of the mapped file
on a GPU    threads read parts of the file into pinned memory, from which they are copied while others are read: a copy
            from a mapped file goes page by page through the driver, on one core, at a fraction of what PCIe carries

safetensors 0.8.0 would keep 64 bytes for ever of each tensor that it hands out (`get_tensor`, slices): half a gigabyte
in a week of a version every 30 s of 400 tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from hetrl.errors import HetrlError
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES, Places, read_into

PART_BYTES, SLOTS, THREADS = 2**25, 16, 8  # half a GB of pinned memory, which torch keeps for the next version


def tensors_of(path: Path, places: Places, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors one at a time; HetrlError where the file ends early."""
    parts = staged(path, places, device) if device.type == "cuda" else _mapped(path, places)
    for name, stored in parts:
        spec, _ = places[name]
        yield name, stored.view(getattr(torch, spec.dtype)).reshape(spec.shape)


def _mapped(path: Path, places: Places) -> Iterator[tuple[str, torch.Tensor]]:
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    for name, (spec, start) in sorted(places.items()):
        first = HEADER_BYTES + start
        yield name, torch.empty(0, dtype=torch.uint8).set_(storage[first : first + spec.bytes])


@dataclass(frozen=True)
class _Part:
    """Bytes of the file from `first` on; where they belong in their tensor, and whether they are its last."""

    name: str
    first: int
    bytes: int
    at: int
    last: bool


def _parts(places: Places, part_bytes: int) -> Iterator[_Part]:
    """Yield what is read at once, in the order of the file."""
    for name, (spec, start) in sorted(places.items(), key=lambda item: item[1][1]):
        for at in range(0, max(spec.bytes, 1), part_bytes):
            length = min(part_bytes, spec.bytes - at)
            yield _Part(name, HEADER_BYTES + start + at, length, at, at + length == spec.bytes)


class _Slots:
    """Pinned memory for a few parts; a part is read once the copy of what its slot held is done."""

    def __init__(self, device: torch.device, part_bytes: int, count: int) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(count, part_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(count)]

    def fill(self, slot: int, descriptor: int, part: _Part) -> torch.Tensor:
        """Read a part (in any thread); return where it stands."""
        if (copied := self._copied[slot]) is not None:
            copied.synchronize()  # at once where nothing was copied yet
        held = self._memory[slot, : part.bytes]
        if read_into(descriptor, held.numpy().data, part.first) < part.bytes:
            raise HetrlError(f"weights: the file ends in the middle of {part.name}")
        return held

    def copy(self, slot: int, held: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy a part to where it belongs."""
        target.copy_(held, non_blocking=True)
        if (copied := self._copied[slot]) is not None:
            copied.record()


def staged(
    path: Path, places: Places, device: torch.device, part_bytes: int = PART_BYTES, slots: int = SLOTS
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the bytes (uint8) of each tensor on the device, in the order of the file; see the module's text."""
    memory, parts = _Slots(device, part_bytes, slots), list(_parts(places, part_bytes))
    with path.open("rb") as file, ThreadPoolExecutor(THREADS, "weights") as pool:

        def read(number: int) -> Future[torch.Tensor]:
            return pool.submit(memory.fill, number % slots, file.fileno(), parts[number])

        reads = [read(number) for number in range(min(slots, len(parts)))]
        try:
            for number, part in enumerate(parts):
                if part.at == 0:
                    whole = torch.empty(places[part.name][0].bytes, dtype=torch.uint8, device=device)
                held = reads[number].result()
                memory.copy(number % slots, held, whole[part.at : part.at + part.bytes])
                if number + slots < len(parts):
                    reads.append(read(number + slots))
                if part.last:
                    yield part.name, whole
        finally:
            for one in reads:  # who stops early leaves nobody at work
                one.cancel()
