"""Pieces that come as changes: what does not fit the base or its tensor is refused, and harms nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from msgspec import structs
from safetensors.numpy import load_file

from hetrl.errors import HetrlError
from hetrl.runtime.weights.digests import version_digest
from hetrl.runtime.weights.pieces import pieces
from hetrl.runtime.weights.weight_file import MOST_CHANGED_BYTES, WeightFile
from hetrl.runtime.wire import TensorSpec, WeightsBegin, WeightsEnd, WeightsTensor, changes

MOST = 10**9
BASE = numpy.arange(8, dtype="float32")
NEXT = BASE + (BASE > 5)


def end_of(version: int, *messages: WeightsTensor) -> WeightsEnd:
    leaves = {(one.tensor.name, one.offset): one.digest for one in messages}
    tensors = {one.tensor.name: one.tensor.bytes for one in messages}
    size, digest = sum(tensors.values()), version_digest(leaves)
    return WeightsEnd(version=version, tensors=len(tensors), bytes=size, digest=digest)


def message_of(version: int, array: numpy.ndarray, name: str = "w") -> WeightsTensor:
    ((message, _),) = pieces(version, name, array.dtype.name, array.shape, array.data)
    return message


@pytest.fixture
def weights(tmp_path: Path) -> WeightFile:
    """A receiver that holds version 1."""
    file, message = WeightFile(tmp_path, MOST), message_of(1, BASE)
    file.begin(WeightsBegin(version=1))
    piece = file.admit(message, BASE.nbytes)
    assert piece is not None
    file.write(piece, BASE.tobytes())
    file.end(end_of(1, message))
    return file


def begin(weights: WeightFile, version: int = 2) -> None:
    assert weights.held is not None
    base, digest = weights.held.version, weights.held.digest
    weights.begin(WeightsBegin(version=version, encoding="delta", base_version=base, base_digest=digest))


def delta() -> tuple[WeightsTensor, bytes]:
    return structs.replace(message_of(2, NEXT), changes=True), changes.encode(BASE, NEXT)


def take(weights: WeightFile, message: WeightsTensor, payload: bytes) -> None:
    piece = weights.admit(message, len(payload))
    assert piece is not None
    weights.write(piece, payload)


def test_changes_are_applied_to_a_copy(weights: WeightFile) -> None:
    assert weights.held is not None
    before = weights.held.path
    begin(weights)
    message, payload = delta()
    take(weights, message, payload)
    assert (load_file(before)["w"] == BASE).all()
    path, digest = weights.end(end_of(2, message))
    assert (load_file(path)["w"] == NEXT).all()
    assert (weights.held.version, weights.held.digest, before.exists()) == (2, digest, False)


def reshaped(message: WeightsTensor) -> WeightsTensor:
    return structs.replace(message, tensor=structs.replace(message.tensor, shape=(2, 4)))


def of_bytes(message: WeightsTensor) -> WeightsTensor:
    return structs.replace(message, tensor=TensorSpec("w", "uint8", (32,), 32))


def large(message: WeightsTensor) -> WeightsTensor:
    words = MOST_CHANGED_BYTES // 4 + 1
    return structs.replace(message, tensor=TensorSpec("w", "float32", (words,), 4 * words), bytes=4 * words)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (reshaped, "the base has"),
        (lambda message: structs.replace(message, tensor=structs.replace(message.tensor, name="v")), "nothing of this"),
        (of_bytes, "cannot come as changes"),
        (large, "cannot come as changes"),
        (lambda message: structs.replace(message, offset=1, bytes=4), "cannot come as changes"),
        (lambda message: structs.replace(message, bytes=36), "lie outside its 32"),
        (lambda message: structs.replace(message, bytes=0), "lie outside its 32"),
        (lambda message: structs.replace(message, offset=-4, bytes=4), "lie outside its 32"),
        (lambda message: structs.replace(message, changes=False), "are not the 32 announced"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(
    weights: WeightFile, change: Callable[[WeightsTensor], WeightsTensor], says: str
) -> None:
    begin(weights)
    message, payload = delta()
    with pytest.raises(HetrlError, match=f"weight version 2: tensor .: .*{says}"):
        weights.admit(change(message), len(payload))
    served(weights, message)


def test_a_payload_for_another_piece_is_refused(weights: WeightFile) -> None:
    begin(weights)
    message, _ = delta()
    with pytest.raises(HetrlError, match="weight version 2: tensor w: changes: made for 7 words"):
        take(weights, message, changes.encode(BASE[1:], NEXT[1:]))


def test_changes_without_a_base_are_refused(weights: WeightFile) -> None:
    weights.begin(WeightsBegin(version=2))
    message, payload = delta()
    with pytest.raises(HetrlError, match="tensor w: came as changes, but the base has nothing"):
        weights.admit(message, len(payload))


def test_pieces_that_leave_a_hole_are_refused(weights: WeightFile) -> None:
    """Their bytes add up, and each has its digest."""
    begin(weights)
    parts = list(pieces(2, "w", "float32", (8,), NEXT.data, 16))
    overlapping = structs.replace(parts[0][0], offset=8)
    for message, buffer in (parts[0], (overlapping, parts[0][1])):
        take(weights, message, bytes(buffer))
    with pytest.raises(HetrlError, match="tensor w: byte 8 of 32 did not arrive once"):
        weights.end(end_of(2, parts[0][0], overlapping))


@pytest.mark.parametrize(("base", "digest"), [(2, None), (0, None), (None, None), (1, "0" * 32), (1, "")])
def test_a_delta_of_another_base_is_refused_before_a_byte_is_written(
    weights: WeightFile, tmp_path: Path, base: int | None, digest: str | None
) -> None:
    assert weights.held is not None
    named = weights.held.digest if digest is None else digest
    message, payload = delta()
    with pytest.raises(HetrlError, match="weight version 2: its base is version .*here is version 1"):
        weights.begin(WeightsBegin(version=2, encoding="delta", base_version=base, base_digest=named))
    assert weights.admit(message, len(payload)) is None
    assert list(tmp_path.iterdir()) == [weights.held.path]
    served(weights, message)


def served(weights: WeightFile, message: WeightsTensor) -> None:
    """The version that was refused ends with its cause, and the one before is as it was."""
    with pytest.raises(HetrlError, match="weight version 2: "):
        weights.end(end_of(2, message))
    assert weights.held is not None
    assert (load_file(weights.held.path)["w"] == BASE).all()
    assert weights.held.version == 1
