from __future__ import annotations

from hypothesis import given, strategies as st

from hetrl.dealing import micro_batches, over_replicas

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)


@given(LENGTHS, st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_every_sequence_goes_to_one_replica(lengths: list[int], shares: list[int]) -> None:
    parts = over_replicas(lengths, shares)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert len(parts) == len(shares)


@given(LENGTHS, st.lists(st.integers(1, 64), min_size=1, max_size=6))
def test_no_replica_ends_much_later_than_the_even_split(lengths: list[int], shares: list[int]) -> None:
    """Whoever took the last sequence was to be the first to end: at most one sequence later than all together."""
    parts = over_replicas(lengths, shares)
    ends = [sum(lengths[index] for index in part) / share for part, share in zip(parts, shares, strict=True)]
    assert max(ends) <= sum(lengths) / sum(shares) + max(lengths) / min(shares)


def test_shares_decide_who_takes_how_many_tokens() -> None:
    parts = over_replicas([100] * 12, (8, 2, 2))
    assert [len(part) for part in parts] == [8, 2, 2]


@given(LENGTHS, st.integers(1, 16))
def test_micro_batches_hold_every_sequence_in_the_memory_that_was_planned_for(lengths: list[int], size: int) -> None:
    indices = range(0, len(lengths), 2)
    parts = micro_batches(indices, lengths, size)
    assert sorted(index for part in parts for index in part) == list(indices)
    assert all(parts)
    most = size * max(lengths[index] for index in indices)
    assert all(sum(lengths[index] for index in part) <= most for part in parts)
    assert len(parts) >= min(-(-len(indices) // size), -(-sum(lengths[index] for index in indices) // (most // size)))


def test_short_sequences_share_micro_batches_up_to_the_longest() -> None:
    assert micro_batches(range(6), [60, 10, 20, 30, 30, 10], 1) == ((0,), (2, 3), (1, 4, 5))


def test_equal_sequences_make_the_planned_number_of_micro_batches() -> None:
    assert micro_batches(range(5), [7] * 5, 2) == ((0, 3), (1, 4), (2,))


def test_nothing_is_one_empty_micro_batch() -> None:
    assert micro_batches((), [3], 4) == ((),)
