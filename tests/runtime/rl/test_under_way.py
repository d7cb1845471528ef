"""Samples under way as a checkpoint keeps them: whole, or not at all."""

from __future__ import annotations

import msgspec
import pytest
import zstandard
from hypothesis import given, strategies as st

from hetrl.runtime import wire
from hetrl.runtime.rl import under_way
from hetrl.runtime.rl.under_way import is_complete, oldest_version, pack, unpack

LONGEST = 8


def sample(lengths: list[int], *, stopped: bool = False) -> wire.Sample:
    """Return a sample with so many tokens of each version from 3 on."""
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    spans = tuple(wire.VersionSpan(3 + n, end - lengths[n], end) for n, end in enumerate(ends))
    count = sum(lengths)
    return wire.Sample(
        tokens=tuple(range(count)),
        logprobs=tuple(-0.1 * n for n in range(count)),
        versions=spans,
        finish_reason="stop" if stopped else "length",
    )


SAMPLES = st.builds(
    lambda lengths, end: sample(lengths, stopped=end), st.lists(st.integers(1, 4), max_size=2), st.booleans()
)


@given(st.dictionaries(st.integers(0, 99), st.tuples(SAMPLES, SAMPLES), max_size=4))
def test_what_is_kept_comes_back(kept: dict[int, tuple[wire.Sample, ...]]) -> None:
    assert unpack(pack(kept), 2, LONGEST) == kept


def test_nothing_is_nothing() -> None:
    assert pack({}) == b""
    assert unpack(b"", 2, LONGEST) == {}
    assert oldest_version([sample([]), sample([])]) is None
    assert oldest_version([sample([]), sample([2, 1])]) == 3


def test_a_sample_ends_where_it_stopped_or_is_as_long_as_it_may_be() -> None:
    assert not is_complete(sample([]), LONGEST)
    assert not is_complete(sample([4]), LONGEST)
    assert is_complete(sample([4], stopped=True), LONGEST)
    assert is_complete(sample([4, 4]), LONGEST)


def changed(**change: object) -> bytes:
    return pack({1: (msgspec.structs.replace(sample([2, 2]), **change),), 2: (sample([2]),)})


@pytest.mark.parametrize(
    "data",
    [
        changed(logprobs=(0.0,)),
        changed(versions=(wire.VersionSpan(3, 0, 3),)),
        changed(versions=(wire.VersionSpan(3, 1, 4),)),
        changed(versions=(wire.VersionSpan(3, 0, 3), wire.VersionSpan(4, 2, 4))),
        pack({1: (sample([4, 4, 4]),), 2: (sample([2]),)}),
        pack({1: (sample([2]), sample([2])), 2: (sample([2]),)}),
    ],
)
def test_what_does_not_fit_is_drawn_again(data: bytes) -> None:
    assert unpack(data, 1, LONGEST) == {2: (sample([2]),)}


@pytest.mark.parametrize(
    "data", [b"x", pack({1: (sample([2]),)})[:-3], zstandard.compress(b"\xc1"), zstandard.compress(b"\x91\x01")]
)
def test_what_is_damaged_is_nothing(data: bytes) -> None:
    assert unpack(data, 1, LONGEST) == {}


def test_what_says_that_it_is_huge_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    data = zstandard.compress(bytes(4000))
    monkeypatch.setattr(under_way, "MOST_BYTES", 1000)
    assert unpack(data, 1, LONGEST) == {}


def test_what_is_too_much_is_left_out_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {number: (sample([4]),) for number in range(9)}
    monkeypatch.setattr(under_way, "MOST_BYTES", 4 * len(msgspec.msgpack.encode(kept[0])) + 1)
    assert sorted(unpack(pack(kept), 1, LONGEST)) == [0, 1, 2, 3]
