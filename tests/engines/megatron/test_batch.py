from __future__ import annotations

import numpy
import pytest
import torch

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.batch import TokenBatch, cut
from hetrl.runtime.megatron.layers import Packing


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


def batch() -> TokenBatch:
    return TokenBatch(**fields())  # type: ignore[arg-type]


def test_sequences_are_laid_end_to_end_and_come_back_as_rows() -> None:
    (micro,) = cut(batch(), [(0, 2)], torch.device("cpu"), multiple=1, equal=False)
    assert micro.inputs.tolist() == [[0, 1, 2, 3, 12, 13, 14]]
    assert micro.packing.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert micro.packing.bounds.tolist() == [0, 4, 7]
    assert micro.mask.tolist() == [[False, True, True, True], [False, True, True, False]]
    assert micro.extras["advantages"].shape == (2, 4)
    values = torch.arange(1.0, 8.0).unsqueeze(0)
    assert micro.rows(values).tolist() == [[0, 2, 3, 4], [0, 6, 7, 0]]


def test_equal_micro_batches_are_filled_up_with_a_sequence_of_no_consequence() -> None:
    first, second = cut(batch(), [(0, 2), (1,)], torch.device("cpu"), multiple=4, equal=True)
    assert first.inputs.shape == second.inputs.shape == (1, 8)
    assert second.packing.bounds.tolist() == [0, 2, 8]
    assert second.mask.shape == (1, 2)
    assert second.rows(torch.arange(1.0, 9.0).unsqueeze(0)).tolist() == [[0, 2]]


def test_a_part_without_samples_has_no_targets() -> None:
    (micro,) = cut(batch(), [()], torch.device("cpu"), multiple=1, equal=False)
    assert micro.inputs.tolist() == [[0, 1, 2, 3]]
    assert not micro.mask.any()


def test_packed_rows_are_what_was_packed() -> None:
    packing = Packing.of([3, 1, 2], torch.device("cpu"))
    values = torch.randn(6, 2, 5)
    assert packing.rows(values).shape == (3, 3, 2, 5)
    assert torch.equal(packing.packed(packing.rows(values)), values)


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
