"""Tensors cut into the pieces that a version of the weights travels in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hetrl.errors import HetrlError
from hetrl.runtime.transport.chunks import Buffer, flat
from hetrl.runtime.weights.digests import digest_of
from hetrl.runtime.wire import TensorSpec, WeightsTensor

PIECE_BYTES = 4 * 2**20  # of a tensor in one message: hashed, compared and written as one

# numpy or torch name -> (safetensors name, bytes per element)
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


def word_bytes(spec: TensorSpec) -> int | None:
    """Return the bytes of the words in which changes of a tensor are found; None where it is always sent whole."""
    size = DTYPES[spec.dtype][1]
    return size if size in (2, 4) else None


def pieces(
    version: int, name: str, dtype: str, shape: Sequence[int], data: memoryview, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[WeightsTensor, memoryview]]:
    """Cut one tensor (C-contiguous, little-endian) into messages of at most `piece_bytes`; an empty one is one piece.

    `dtype` is a numpy or torch name, bfloat16 included. The digests are taken. Raises HetrlError when `data` is not as
    long as the shape says.
    """
    data = flat(data)
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape), bytes=data.nbytes)
    check_spec(spec, version)
    for offset in range(0, max(data.nbytes, 1), piece_bytes):
        part = data[offset : offset + piece_bytes]
        yield piece_of(version, spec, offset, part), part


def piece_of(version: int, spec: TensorSpec, offset: int, data: Buffer) -> WeightsTensor:
    """Return the message of a piece whose bytes are `data`."""
    size = memoryview(data).nbytes
    return WeightsTensor(version=version, tensor=spec, offset=offset, bytes=size, digest=digest_of(data))


def check_spec(spec: TensorSpec, version: int) -> None:
    """Raise HetrlError for a dtype without a name here, a reserved name, or bytes that shape and dtype do not make."""
    where = f"weight version {version}: tensor {spec.name}"
    if spec.dtype not in DTYPES:
        raise HetrlError(f"{where}: dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
    if not spec.name or spec.name == "__metadata__":
        raise HetrlError(f"{where}: this name cannot be written")
    expected = math.prod(spec.shape) * DTYPES[spec.dtype][1]
    if expected != spec.bytes or any(extent < 0 for extent in spec.shape):
        raise HetrlError(f"{where}: {spec.dtype} {list(spec.shape)} takes {expected} bytes, {spec.bytes} announced")
