"""bf16 numbers in two planes: every bit comes back, gradients get smaller, and damage is an error."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError
from hetrl.runtime.wire import planes

_WORDS = st.lists(st.integers(0, 2**16 - 1), max_size=300).map(lambda words: numpy.array(words, numpy.uint16))


def _gradients(count: int) -> planes.Words:
    """bf16 of normal numbers: the upper halves of fp32."""
    values = numpy.random.default_rng(0).normal(0, 1e-4, count).astype(numpy.float32)
    return (values.view(numpy.uint32) >> 16).astype(numpy.uint16)


@given(_WORDS)
def test_every_bit_comes_back(words: planes.Words) -> None:
    place = numpy.zeros_like(words)
    planes.unpack(planes.pack(words), place)
    assert numpy.array_equal(place, words)


def test_normal_numbers_take_two_thirds() -> None:
    words = _gradients(1_000_000)
    assert len(planes.pack(words)) < 0.68 * words.nbytes


@given(st.data(), _WORDS)
def test_damage_is_an_error_or_other_numbers_and_stays_inside(data: st.DataObject, words: planes.Words) -> None:
    payload = bytearray(planes.pack(words))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    place = numpy.full(words.size + 1, 7, numpy.uint16)
    try:
        planes.unpack(bytes(payload), place[:-1])
    except HetrlError:
        assert (place == 7).all()
    assert place[-1] == 7


@given(_WORDS, st.integers(-5, 5).filter(bool))
def test_another_length_is_an_error(words: planes.Words, more: int) -> None:
    with pytest.raises(HetrlError, match="planes: "):
        planes.unpack(planes.pack(words), numpy.zeros(max(0, words.size + more) if words.size else 1, numpy.uint16))


def test_a_frame_that_announces_more_than_fits_is_an_error() -> None:
    words = numpy.zeros(10_000_000, numpy.uint16)
    length = int.from_bytes(planes.pack(words)[:4], "little")
    bomb = planes.pack(words)[: 4 + length] + bytes(5)
    with pytest.raises(HetrlError, match="6 exponents for 5 numbers, or more"):
        planes.unpack(bomb, numpy.zeros(5, numpy.uint16))
