"""Arrays as the buffers of a message: numpy on one side, `wire.ArraySpec` and raw bytes on the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime.wire import ArraySpec

Arrays = dict[str, NDArray[Any]]

DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)


def pack(arrays: Mapping[str, NDArray[Any]]) -> tuple[tuple[ArraySpec, ...], list[memoryview]]:
    """Describe arrays and give their bytes, one buffer each in the same order.

    A C-contiguous little-endian array is not copied: its buffer shows what the array holds when it is sent.
    Raises HetrlError for a dtype outside `DTYPES`.
    """
    specs, buffers = [], []
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise HetrlError(f"array {name!r}: dtype {array.dtype.name} cannot be sent; use one of {_listed()}")
        plain = numpy.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        specs.append(ArraySpec(name=name, dtype=array.dtype.name, shape=array.shape))
        buffers.append(plain.reshape(-1).view(numpy.uint8).data)
    return tuple(specs), buffers


def unpack(specs: Sequence[ArraySpec], buffers: Sequence[bytes | memoryview]) -> dict[str, NDArray[Any]]:
    """Read the arrays that `specs` describe, without copying; what lies on a read-only buffer is read-only.

    Raises HetrlError when a name repeats, a dtype is outside `DTYPES`, a shape is impossible, or the number or the
    size of the buffers does not match.
    """
    if len(specs) != len(buffers):
        raise HetrlError(f"{len(specs)} arrays are described but {len(buffers)} buffers arrived")
    if len({spec.name for spec in specs}) != len(specs):
        raise HetrlError(f"an array is described twice among {[spec.name for spec in specs]}")
    return {spec.name: _read(spec, buffer) for spec, buffer in zip(specs, buffers, strict=True)}


def _read(spec: ArraySpec, buffer: bytes | memoryview) -> NDArray[Any]:
    """Read one array."""
    if spec.dtype not in DTYPES:
        raise HetrlError(f"array {spec.name!r}: dtype {spec.dtype!r} is not one of {_listed()}")
    dtype = numpy.dtype(spec.dtype).newbyteorder("<")
    if any(length < 0 for length in spec.shape):
        raise HetrlError(f"array {spec.name!r}: shape {spec.shape} has a negative length")
    expected = math.prod(spec.shape) * dtype.itemsize
    arrived = memoryview(buffer).nbytes
    if arrived != expected:
        raise HetrlError(
            f"array {spec.name!r}: {spec.dtype} of shape {spec.shape} takes {expected} bytes, {arrived} arrived"
        )
    try:
        flat = numpy.frombuffer(buffer, dtype=dtype) if expected else numpy.empty(0, dtype=dtype)
        return flat.reshape(spec.shape)
    except (ValueError, OverflowError) as error:
        raise HetrlError(f"array {spec.name!r}: shape {spec.shape} is impossible ({error})") from error


def _listed() -> str:
    return ", ".join(sorted(DTYPES))
