"""Changes between two versions of an array: what comes out is what went in; what is damaged is refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy
import pytest
import zstandard
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from hetrl.errors import HetrlError
from hetrl.runtime.wire import changes


def versions(
    words: int, share: float, dtype: str = "<u2", seed: int = 0, most: int | None = None
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Random words, and the same with a share of them changed by at most `most` (None: to anything)."""
    random = numpy.random.default_rng(seed)
    top = int(numpy.iinfo(dtype).max)
    base = random.integers(0, top, words, dtype=dtype, endpoint=True)
    places = random.random(words) < share
    steps = random.integers(1, most or top, words, dtype=dtype, endpoint=True)
    return base, base + steps * places


@given(
    words=st.integers(0, 3000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    dtype=st.sampled_from(["<u2", "<u4"]),
    most=st.sampled_from([1, 300, None]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None)
def test_what_is_applied_is_what_was_encoded(words: int, share: float, dtype: str, most: int | None, seed: int) -> None:
    base, current = versions(words, share, dtype, seed, most)
    payload = changes.encode(base, current)
    differ = int((base != current).sum())
    assert changes.changed_words(payload) == differ
    assert changes.apply(base, payload) == differ
    assert (base == current).all()


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_blocks_meet_without_a_seam(extra: int) -> None:
    words = 2 * changes.BLOCK_WORDS + extra
    base = numpy.zeros(words, "<u2")
    current = base.copy()
    current[[0, changes.BLOCK_WORDS - 1, changes.BLOCK_WORDS, words - 1]] = 1, 2, 3, 65535
    assert changes.apply(base, changes.encode(base, current)) == 4
    assert (base == current).all()


def test_numbers_are_their_bits() -> None:
    """NaN of any kind, -0.0 and denormal numbers come back as they were; float arrays are taken as they are."""
    before = numpy.array([0.0, 1.0, numpy.nan, numpy.inf], "<f4")
    after = numpy.array([-0.0, 1.0, -numpy.nan, 1e-45], "<f4")
    after.view("<u4")[2] |= 7
    expected = after.tobytes()
    assert changes.apply(before, changes.encode(before, after)) == 3
    assert before.tobytes() == expected


def test_a_step_of_an_optimiser_is_small() -> None:
    """One bf16 word in a hundred moves to its neighbour: 10 bits each, where the entropy is 9.1."""
    random = numpy.random.default_rng(0)
    base = random.integers(0, 2**16, 2**20, dtype="<u2")
    steps = numpy.where(random.random(base.size) < 0.01, random.choice([1, -1], base.size), 0)
    payload = changes.encode(base, base + steps.astype("<u2"))
    assert len(payload) * 8 / changes.changed_words(payload) < 10.5
    assert base.nbytes / len(payload) > 150


@pytest.mark.parametrize(
    ("base", "current", "says"),
    [
        (numpy.zeros(4, "<u2"), numpy.zeros(5, "<u2"), "4 words of 2 bytes before, 5 of 2 after"),
        (numpy.zeros(4, "<u2"), numpy.zeros(4, "<u4"), "4 words of 2 bytes before, 4 of 4 after"),
        (numpy.zeros(4, "<u8"), numpy.zeros(4, "<u8"), "no flat row"),
        (numpy.zeros((2, 2), "<u2"), numpy.zeros((2, 2), "<u2"), "no flat row"),
        (numpy.zeros(8, "<u2")[::2], numpy.zeros(4, "<u2"), "no flat row"),
    ],
)
def test_arrays_of_another_form_are_refused(base: NDArray[Any], current: NDArray[Any], says: str) -> None:
    with pytest.raises(HetrlError, match=says):
        changes.encode(base, current)


def refused(base: NDArray[Any], payload: bytes) -> None:
    """What is refused leaves the base as it was."""
    before = base.copy()
    with pytest.raises(HetrlError, match="changes: "):
        changes.apply(base, payload)
    assert (base == before).all()


def test_a_payload_for_another_base_is_refused() -> None:
    base, current = versions(1000, 0.1)
    payload = changes.encode(base, current)
    refused(base[:-1], payload)
    refused(numpy.zeros(1000, "<u4"), payload)
    read_only = base.copy()
    read_only.flags.writeable = False
    refused(read_only, payload)


def test_a_payload_cut_anywhere_is_refused() -> None:
    base, current = versions(300, 0.1)
    payload = changes.encode(base, current)
    for size in range(len(payload)):
        refused(base, payload[:size])
    refused(base, payload + b"\0")


def test_nothing_of_a_payload_is_written_where_a_later_block_is_damaged() -> None:
    base, current = versions(2 * changes.BLOCK_WORDS, 0.001)
    refused(base, changes.encode(base, current)[:-1])


@given(data=st.data())
@settings(deadline=None, max_examples=300)
def test_no_damage_gets_past_the_checks_but_as_other_changes(data: st.DataObject) -> None:
    """A flipped byte either ends in an error that writes nothing, or in changes (digests tell those)."""
    base, current = versions(500, 0.1, seed=data.draw(st.integers(0, 20)))
    payload = bytearray(changes.encode(base, current))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    before = base.copy()
    try:
        changed = changes.apply(base, bytes(payload))
    except HetrlError:
        assert (base == before).all()
    else:
        assert changed == (base != before).sum()


@given(payload=st.binary(max_size=200), words=st.integers(0, 20))
@settings(deadline=None)
def test_arbitrary_bytes_are_refused_or_are_changes(payload: bytes, words: int) -> None:
    head = struct.pack("<QQB", words, 0, 2)
    for bytes_ in (payload, head + payload):
        base = numpy.zeros(words, "<u2")
        try:
            assert changes.apply(base, bytes_) == numpy.count_nonzero(base)
        except HetrlError:
            assert not base.any()


def crafted(planes: list[bytes], changed: int, words: int = 100) -> bytes:
    """A payload of one block of 2-byte words with these planes, as they are."""
    head = struct.pack("<QQB", words, changed, 2)
    return head + struct.pack("<7I", changed, *map(len, planes)) + b"".join(planes)


def test_a_plane_that_unpacks_to_more_than_it_should_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.compress(bytes(2**26))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(b"\1\1")
    for plane in (bomb, silent, b"junk", zstandard.compress(b"\1\1") * 2, zstandard.compress(b"\1")):
        refused(numpy.zeros(100, "<u2"), crafted([plane, b"", b"", b"", zstandard.compress(b"\1\1"), b""], 2))


def test_a_change_outside_the_array_is_refused() -> None:
    far, one = zstandard.compress(b"\xff"), zstandard.compress(b"\1")
    refused(numpy.zeros(100, "<u2"), crafted([far, b"", b"", b"", one, b""], 1))
    refused(numpy.zeros(100, "<u2"), crafted([far, far, far, far, one, b""], 1))
    refused(numpy.zeros(100, "<u2"), crafted([b"", b"", b"", b"", b"", b""], 1))
    refused(numpy.zeros(100, "<u2"), crafted([b"", b"", b"", b"", one, b""], 2**32 - 1))
