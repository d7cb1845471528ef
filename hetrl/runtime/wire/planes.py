"""bf16 numbers in two thirds of their bytes, lossless: exponents take few values, their plane is packed.

A bf16 number is a sign, 8 bits of exponent and 7 of mantissa. Turned left by one bit, its upper byte is the exponent
and its lower one mantissa and sign, which are as good as random in gradients. A payload is (little-endian)

    packed      uint32    bytes of the next part
    exponents   the upper bytes, as a frame of zstandard's entropy coder
    rest        the lower bytes, one for each number
"""

from __future__ import annotations

import struct
from typing import Any

import numpy
import zstandard
from numpy.typing import NDArray

from hetrl.errors import HetrlError

_HEAD = struct.Struct("<I")
# The entropy coder alone: no search for what repeats, of which gradients have nothing.
_CODER = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)

Words = NDArray[numpy.uint16]


def pack(words: Words) -> bytes:
    """Return the payload of flat bf16 numbers, given by their bits."""
    turned = (words << 1) | (words >> 15)
    exponents = zstandard.ZstdCompressor(compression_params=_CODER).compress((turned >> 8).astype(numpy.uint8).data)
    return b"".join((_HEAD.pack(len(exponents)), exponents, turned.astype(numpy.uint8).data))


def unpack(payload: bytes | memoryview, words: Words) -> None:
    """Write the numbers of a payload to `words`; raises HetrlError where it is damaged or of another length.

    Nothing is written then. No more is held than `words` takes, whatever the payload says.
    """
    view = memoryview(payload).cast("B")
    length = _HEAD.unpack_from(view)[0] if view.nbytes >= _HEAD.size else 0
    if _HEAD.size + length + words.size != view.nbytes:
        raise HetrlError(f"planes: {view.nbytes} bytes do not hold {words.size} numbers")
    exponents = numpy.empty(words.size + 1, numpy.uint8)  # one more than there are, to see that there are no more
    try:
        with zstandard.ZstdDecompressor().stream_reader(view[_HEAD.size : _HEAD.size + length]) as reader:
            found = _fill(reader, exponents)
    except zstandard.ZstdError as error:
        raise HetrlError(f"planes: the exponents cannot be read ({error})") from None
    if found != words.size:
        raise HetrlError(f"planes: {found} exponents for {words.size} numbers, or more")
    turned = exponents[:-1].astype(numpy.uint16) << 8
    turned |= numpy.frombuffer(view[_HEAD.size + length :], numpy.uint8)
    words[:] = (turned >> 1) | (turned << 15)


def _fill(reader: Any, place: NDArray[numpy.uint8]) -> int:
    """Read until the place is full or the stream ends; return how many bytes came."""
    found = 0
    while found < place.size and (more := reader.readinto(place[found:])):
        found += more
    return found
