"""The file that weights arrive in: the layout of https://github.com/huggingface/safetensors ("Format").

The header's length in 8 bytes, a JSON header padded with spaces, the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from hetrl.errors import HetrlError
from hetrl.runtime.transport.chunks import Buffer, flat
from hetrl.runtime.weights.pieces import DTYPES
from hetrl.runtime.wire import TensorSpec

# Bytes kept for the length and the header: enough for some 30,000 tensors at about 130 bytes each.
HEADER_BYTES = 4 * 2**20
_BLOCK_BYTES = 2**16

Places = Mapping[str, tuple[TensorSpec, int]]  # of each tensor: what it is, and its first byte in the data section


def header_of(places: Places) -> bytes:
    """Return the length and the JSON header; the length counts the padding up to HEADER_BYTES."""
    entries = {
        name: {"dtype": DTYPES[spec.dtype][0], "shape": spec.shape, "data_offsets": (start, start + spec.bytes)}
        for name, (spec, start) in places.items()
    }
    return (HEADER_BYTES - 8).to_bytes(8, "little") + json.dumps(entries, separators=(",", ":")).encode()


def places_of(path: Path) -> dict[str, tuple[TensorSpec, int]]:
    """Return where the tensors of a file stand, as its header says."""
    names = {name: dtype for dtype, (name, _) in DTYPES.items()}
    with path.open("rb") as file:
        file.seek(8)
        header = _read_header(file)
    return {
        name: (TensorSpec(name, names[entry["dtype"]], tuple(entry["shape"]), end - start), start)
        for name, entry in header.items()
        for start, end in [entry["data_offsets"]]
    }


def _read_header(file: BinaryIO) -> dict[str, Any]:
    """Read the JSON header; of the padding behind it, which is nearly all, no more than a block."""
    text, left = b"", HEADER_BYTES - 8
    while block := file.read(min(_BLOCK_BYTES, left)):
        text, left = text + block, left - len(block)
        if block.endswith(b" "):  # else it goes on in the next one
            with suppress(ValueError):
                return cast(dict[str, Any], json.loads(text))
    return cast(dict[str, Any], json.loads(text))


def write_at(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all of a buffer at a place of the file."""
    rest = flat(data)
    while rest.nbytes:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def read_into(descriptor: int, data: Buffer, offset: int) -> int:
    """Fill a buffer from a place of the file; return how many bytes there were, fewer where it ends early."""
    rest = flat(data)
    while rest.nbytes and (count := os.preadv(descriptor, [rest], offset)):
        rest, offset = rest[count:], offset + count
    return flat(data).nbytes - rest.nbytes


def read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset`."""
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise HetrlError(f"the file ends {size - len(data)} bytes early")
    return data
