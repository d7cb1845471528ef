"""What differs between two versions of an array, lossless and small: places and values of the words that changed.

A *word* is the 2 or 4 bytes of one number (bf16, fp16, fp32); it is compared and carried by its bits, so that NaN and
-0.0 are numbers like any other. Between two versions of bf16 weights most words stay, and one that changes moves to a
neighbouring number: its bits, read as an integer, change by one. So each change is

    gap       how many words stay before it, since the change before it            uint32
    step      current - base, modulo 2^16 or 2^32, as zigzag: 0, -1, 1, -2, ..     uint16 or uint32

(zigzag: https://protobuf.dev/programming-guides/encoding/#signed-ints). The bytes of equal weight of all gaps, then of
all steps, stand together in *planes*, which the entropy coder of zstandard takes close to their entropy; a plane of
zeros alone is left out. A payload is (little-endian)

    words       uint64    length of the array
    changed     uint64    how many words differ
    word_bytes  uint8     2 or 4
    then, for every `BLOCK_WORDS` words: changed uint32, the length of each plane uint32 (0: zeros), the planes

`docs/decisions.md` has what else was measured.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy
import zstandard
from numpy.typing import NDArray

from hetrl.errors import HetrlError

BLOCK_WORDS = 2**20  # what is compared at once: stays in a core's cache, bounds what a payload makes a receiver hold
# The entropy coder alone, as good as no search for what repeats: smaller here and faster than the level as it is.
_CODER = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
_HEAD = struct.Struct("<QQB")
_GAP_BYTES = 4

Words = NDArray[Any]


def encode(base: Words, current: Words) -> bytes:
    """Return what turns `base` into `current`: two flat C-contiguous arrays of equal length and equal word size.

    Raises HetrlError for other arrays.
    """
    before, after = _words(base), _words(current)
    if before.size != after.size or before.dtype != after.dtype:
        raise HetrlError(
            f"changes: {base.size} words of {base.dtype.itemsize} bytes before, "
            f"{current.size} of {current.dtype.itemsize} after"
        )
    return _payload(before.size, before.dtype, _compared(before, after))


def apply(base: Words, payload: bytes | memoryview) -> int:
    """Turn `base`, flat and writable, into the current version in place; return how many words changed.

    Raises HetrlError for a payload that is damaged, or was not made for an array of this length and word size; then
    nothing is written. Whether `base` is the one that it was made for is not seen here: compare digests. At most
    `4 + word_bytes` bytes per changed word are held, and no more than `base` has words, whatever the payload says.
    """
    words = _words(base)
    if not words.flags.writeable:
        raise HetrlError("changes: the base is read-only")
    blocks = _blocks(memoryview(payload).cast("B"), words)
    for start, places, steps in blocks:
        words[start : start + BLOCK_WORDS][places] += steps
    return sum(len(places) for _, places, _ in blocks)


def changed_words(payload: bytes | memoryview) -> int:
    """Return how many words a payload says that it changes; HetrlError when it is too short to say so."""
    return _head(memoryview(payload).cast("B"))[1]


def _words(array: Words) -> Words:
    if array.ndim != 1 or not array.flags.c_contiguous or array.dtype.itemsize not in (2, 4):
        raise HetrlError(f"changes: an array of {array.dtype} and shape {array.shape} is no flat row of 2 or 4 bytes")
    return array.view(f"<u{array.dtype.itemsize}")


def _compared(before: Words, after: Words) -> Iterator[tuple[Words, Words]]:
    """Yield the places and steps of each block."""
    for start in range(0, before.size, BLOCK_WORDS):
        old, new = before[start : start + BLOCK_WORDS], after[start : start + BLOCK_WORDS]
        places = numpy.flatnonzero(old != new)
        yield places, new[places] - old[places]


def _payload(words: int, dtype: numpy.dtype[Any], blocks: Iterator[tuple[Words, Words]]) -> bytes:
    parts, changed = [b""], 0
    compressor = zstandard.ZstdCompressor(compression_params=_CODER)
    for places, steps in blocks:
        changed += len(places)
        gaps = (numpy.diff(places, prepend=-1) - 1).astype("<u4")
        planes = [*_planes(gaps), *_planes(_zigzag(steps))]
        packed = [compressor.compress(plane) if plane.any() else b"" for plane in planes]
        parts += [struct.pack(f"<{1 + len(packed)}I", len(places), *map(len, packed)), *packed]
    parts[0] = _HEAD.pack(words, changed, dtype.itemsize)
    return b"".join(parts)


def _zigzag(steps: Words) -> Words:
    signed = steps.view(f"<i{steps.dtype.itemsize}")
    zigzag: Words = ((signed << 1) ^ (signed >> (8 * steps.dtype.itemsize - 1))).view(steps.dtype)
    return zigzag


def _planes(values: Words) -> Words:
    return numpy.ascontiguousarray(values.view("u1").reshape(-1, values.dtype.itemsize).T)


def _head(payload: memoryview) -> tuple[int, int, int]:
    if payload.nbytes < _HEAD.size:
        raise HetrlError(f"changes: {payload.nbytes} bytes are no payload")
    words, changed, word_bytes = _HEAD.unpack_from(payload)
    return words, changed, word_bytes


def _blocks(payload: memoryview, base: Words) -> list[tuple[int, Words, Words]]:
    """Return start, places within the block and steps of every block, all of it checked against the base."""
    words, changed, word_bytes = _head(payload)
    if (words, word_bytes) != (base.size, base.dtype.itemsize):
        raise HetrlError(
            f"changes: made for {words} words of {word_bytes} bytes, the base has {base.size} of {base.dtype.itemsize}"
        )
    at, found = _HEAD.size, []
    for start in range(0, words, BLOCK_WORDS):
        places, steps, at = _block(payload, at, min(BLOCK_WORDS, words - start), base.dtype)
        found.append((start, places, steps))
    counted = sum(len(places) for _, places, _ in found)
    if at != payload.nbytes or counted != changed:
        raise HetrlError(f"changes: {counted} of {changed} changes in {at} of {payload.nbytes} bytes")
    return found


def _block(payload: memoryview, at: int, words: int, dtype: numpy.dtype[Any]) -> tuple[Words, Words, int]:
    """Return places and steps of the block of so many words that stands at a byte, and where it ends."""
    head = struct.Struct(f"<{1 + _GAP_BYTES + dtype.itemsize}I")
    if payload.nbytes - at < head.size:
        raise HetrlError(f"changes: cut off at byte {payload.nbytes}")
    count, *lengths = head.unpack_from(payload, at)
    at += head.size
    if count > words or sum(lengths) > payload.nbytes - at:
        raise HetrlError(f"changes: {count} changes in {sum(lengths)} bytes do not fit a block of {words} words")
    rows = numpy.zeros((count, len(lengths)), "u1")
    for plane, length in enumerate(lengths):
        if length:
            rows[:, plane] = _plane(payload[at : at + length], count)
        at += length
    gaps = numpy.ascontiguousarray(rows[:, :_GAP_BYTES]).view("<u4").reshape(count)
    zigzag = numpy.ascontiguousarray(rows[:, _GAP_BYTES:]).view(dtype).reshape(count)
    places = (gaps.astype(numpy.int64) + 1).cumsum() - 1
    if count and (places[-1] >= words or not zigzag.all()):
        raise HetrlError(f"changes: one lies outside its block of {words} words, or changes nothing")
    return places.astype(numpy.uint32), (zigzag >> 1) ^ (-(zigzag & 1)).astype(dtype), at


def _plane(packed: memoryview, size: int) -> Words:
    """Return a plane of so many bytes; what the frame itself says of its size is checked before room is made for it."""
    try:
        announced = zstandard.get_frame_parameters(packed).content_size
        if announced == size:
            plane = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
            return numpy.frombuffer(plane, "u1", count=size)
    except (zstandard.ZstdError, ValueError) as error:
        raise HetrlError(f"changes: a plane cannot be read ({error})") from None
    raise HetrlError(f"changes: a plane has {announced} bytes, its block {size} changes")
