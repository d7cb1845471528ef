from __future__ import annotations

import numpy
import pytest

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.batch import TokenBatch


def fields() -> dict[str, object]:
    """Three sequences of 4, 2 and 3 tokens in a width of 6; all but each first token are targets."""
    lengths = numpy.array([4, 2, 3])
    columns = numpy.arange(6)[None, :]
    mask = (columns < lengths[:, None]) & (columns > 0)
    advantages = numpy.ones((3, 6), dtype=numpy.float32)
    return {
        "tokens": numpy.arange(18).reshape(3, 6),
        "lengths": lengths,
        "mask": mask,
        "extras": {"advantages": advantages},
    }


def test_real_marks_what_is_not_padding() -> None:
    batch = TokenBatch(**fields())  # type: ignore[arg-type]
    assert batch.samples == 3
    assert batch.real.sum(axis=1).tolist() == [4, 2, 3]
    assert batch.real[1].tolist() == [True, True, False, False, False, False]


def test_trimmed_cuts_every_array_to_the_longest_sequence() -> None:
    batch = TokenBatch(**fields()).trimmed()  # type: ignore[arg-type]
    assert batch.tokens.shape == batch.mask.shape == batch.extras["advantages"].shape == (3, 4)


def test_rows_take_every_array() -> None:
    batch = TokenBatch(**fields()).rows(1, 3)  # type: ignore[arg-type]
    assert batch.tokens[:, 0].tolist() == [6, 12]
    assert batch.lengths.tolist() == [2, 3]
    assert batch.extras["advantages"].shape == (2, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": numpy.zeros((3, 6), dtype=numpy.int32)}, "tokens must be int64"),
        ({"tokens": numpy.zeros(6, dtype=numpy.int64)}, "tokens must be int64"),
        ({"lengths": numpy.array([4, 2])}, r"lengths must be int64 \[3\]"),
        ({"lengths": numpy.array([4, 0, 3])}, "1..6"),
        ({"lengths": numpy.array([4, 2, 7])}, "1..6"),
        ({"mask": numpy.zeros((3, 5), dtype=bool)}, "mask must be bool"),
        ({"mask": numpy.ones((3, 6), dtype=bool)}, "first token or on padding"),
        ({"extras": {"advantages": numpy.zeros((3, 6))}}, "advantages must be float32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(HetrlError, match=message):
        TokenBatch(**(fields() | change))  # type: ignore[arg-type]
