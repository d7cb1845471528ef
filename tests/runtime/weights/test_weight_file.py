"""Weights between the wire and a file: whatever the order, the file is right or the version is refused."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from hetrl.errors import HetrlError
from hetrl.runtime.weights.digests import digest_of, version_digest
from hetrl.runtime.weights.pieces import pieces
from hetrl.runtime.weights.weight_file import WeightFile, most_bytes
from hetrl.runtime.wire import TensorSpec, WeightsBegin, WeightsEnd, WeightsTensor
from hetrl.workload import architecture

MOST = 10**6  # bytes of a version
DTYPES = ("float32", "float16", "int64", "uint8")
Piece = tuple[WeightsTensor, memoryview]


@dataclass(frozen=True)
class Sent:
    """A version as the sender cuts it."""

    arrays: dict[str, numpy.ndarray]
    pieces: list[Piece]
    end: WeightsEnd


def cut(version: int, arrays: dict[str, numpy.ndarray], piece_bytes: int) -> Sent:
    cut_pieces = [
        piece
        for name, array in arrays.items()
        for piece in pieces(version, name, array.dtype.name, array.shape, array.data, piece_bytes)
    ]
    leaves = {(message.tensor.name, message.offset): message.digest for message, _ in cut_pieces}
    end = WeightsEnd(
        version=version,
        tensors=len(arrays),
        bytes=sum(array.nbytes for array in arrays.values()),
        digest=version_digest(leaves),
    )
    return Sent(arrays, cut_pieces, end)


def add(weights: WeightFile, message: WeightsTensor, buffer: bytes | memoryview) -> None:
    """Let a piece arrive; what is wrong with it is raised at once, and again at the end."""
    piece = weights.admit(message, memoryview(buffer).nbytes)
    if piece is not None:
        try:
            weights.write(piece, buffer)
        except HetrlError as error:
            raise weights.reject(str(error)) from None


def arrive(weights: WeightFile, sent: Sent, order: list[Piece] | None = None) -> tuple[Path, str]:
    weights.begin(WeightsBegin(version=sent.end.version, encoding="full"))
    for message, buffer in sent.pieces if order is None else order:
        with suppress(HetrlError):  # the end says it, too
            add(weights, message, buffer)
    return weights.end(sent.end)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "weights"


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, numpy.ndarray]:
    names = draw(st.lists(st.text("ab.01_µ", min_size=1, max_size=8), min_size=1, max_size=5, unique=True))
    generator = numpy.random.default_rng(draw(st.integers(0, 2**16)))
    shapes = st.lists(st.integers(0, 7), max_size=3)
    return {name: generator.integers(0, 100, size=draw(shapes)).astype(draw(st.sampled_from(DTYPES))) for name in names}


def small() -> Sent:
    return cut(4, {"a": numpy.arange(10, dtype="float32"), "b": numpy.arange(6, dtype="int64").reshape(2, 3)}, 16)


@settings(max_examples=50, deadline=None)
@given(arrays(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_pieces_in_any_order_make_a_file_that_safetensors_reads(arrays, chunk_bytes, random) -> None:
    sent = cut(7, arrays, chunk_bytes)
    order = list(sent.pieces)
    random.shuffle(order)
    with scratch() as directory:
        path, digest = arrive(WeightFile(directory, MOST), sent, order)
        read = load_file(path)
        assert digest == sent.end.digest
    assert read.keys() == arrays.keys()
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        numpy.testing.assert_array_equal(read[name], array)


@settings(max_examples=50, deadline=None)
@given(arrays(), st.integers(1, 40), st.data())
def test_a_flipped_byte_is_refused_and_no_file_left(arrays, chunk_bytes, data) -> None:
    sent = cut(7, arrays, chunk_bytes)
    filled = [number for number, (_, buffer) in enumerate(sent.pieces) if buffer.nbytes]
    if not filled:
        return
    number = data.draw(st.sampled_from(filled))
    message, buffer = sent.pieces[number]
    damaged = bytearray(buffer)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    order = [*sent.pieces[:number], (message, memoryview(damaged)), *sent.pieces[number + 1 :]]
    with scratch() as directory:
        with pytest.raises(HetrlError, match=r"weight version 7: tensor .*digest"):
            arrive(WeightFile(directory, MOST), sent, order)
        assert list(directory.iterdir()) == []


@settings(max_examples=50, deadline=None)
@given(arrays(), st.integers(1, 40), st.data())
def test_a_missing_piece_is_refused(arrays, chunk_bytes, data) -> None:
    sent = cut(7, arrays, chunk_bytes)
    number = data.draw(st.integers(0, len(sent.pieces) - 1))
    with scratch() as directory:
        with pytest.raises(HetrlError, match="weight version 7"):
            arrive(WeightFile(directory, MOST), sent, [*sent.pieces[:number], *sent.pieces[number + 1 :]])
        assert list(directory.iterdir()) == []


@settings(max_examples=50, deadline=None)
@given(arrays(), st.integers(1, 40), st.data())
def test_a_piece_that_comes_twice_is_refused(arrays, chunk_bytes, data) -> None:
    sent = cut(7, arrays, chunk_bytes)
    twice = sent.pieces[data.draw(st.integers(0, len(sent.pieces) - 1))]
    with scratch() as directory, pytest.raises(HetrlError, match=r"weight version 7: tensor .* came twice"):
        arrive(WeightFile(directory, MOST), sent, [*sent.pieces, twice])


def test_bfloat16_bytes_stay_as_they_are(tmp_path) -> None:
    raw = bytes(range(12))
    sent = list(pieces(1, "w", "bfloat16", (2, 3), memoryview(raw), 5))
    weights = WeightFile(tmp_path, MOST)
    weights.begin(WeightsBegin(version=1, encoding="full"))
    for message, buffer in sent:
        add(weights, message, buffer)
    path, _ = weights.end(
        WeightsEnd(version=1, tensors=1, bytes=12, digest=version_digest({("w", m.offset): m.digest for m, _ in sent}))
    )
    with safe_open(path, framework="numpy") as file:
        assert (file.get_slice("w").get_dtype(), file.get_slice("w").get_shape()) == ("BF16", [2, 3])
    assert path.read_bytes().endswith(raw)


def test_only_the_newest_version_stays(tmp_path) -> None:
    weights = WeightFile(tmp_path, MOST)
    files = [arrive(weights, cut(version, {"a": numpy.arange(version)}, 8))[0] for version in (1, 2, 3)]
    assert list(tmp_path.iterdir()) == [files[-1]]


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_a_file_that_cannot_be_removed_costs_no_version(tmp_path, monkeypatch, error) -> None:
    weights = WeightFile(tmp_path, MOST)
    first, _ = arrive(weights, small())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(error()))
        second, _ = arrive(weights, cut(2, {"a": numpy.arange(2)}, 8))
    assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert [arrive(weights, cut(3, {"a": numpy.arange(3)}, 8))[0]] == list(tmp_path.iterdir())


def test_a_refused_version_leaves_the_one_before_and_the_next_arrives(tmp_path) -> None:
    weights = WeightFile(tmp_path, MOST)
    first, _ = arrive(weights, cut(1, {"a": numpy.arange(4)}, 8))
    with pytest.raises(HetrlError, match="tensor a: byte 24 of 80 did not arrive once"):
        arrive(weights, lost := cut(2, {"a": numpy.arange(10)}, 8), lost.pieces[:3])
    assert list(tmp_path.iterdir()) == [first]
    third, _ = arrive(weights, cut(3, {"a": numpy.arange(9)}, 8))
    numpy.testing.assert_array_equal(load_file(third)["a"], numpy.arange(9))


def test_an_unfinished_version_is_dropped_when_the_next_begins(tmp_path) -> None:
    weights = WeightFile(tmp_path, MOST)
    weights.begin(WeightsBegin(version=3, encoding="full"))
    add(weights, *cut(3, {"a": numpy.arange(9)}, 8).pieces[0])
    path, _ = arrive(weights, small())
    assert list(tmp_path.iterdir()) == [path]


def test_after_a_refused_piece_the_rest_is_ignored_and_the_end_repeats_the_cause(tmp_path) -> None:
    sent = small()
    weights = WeightFile(tmp_path, MOST)
    weights.begin(WeightsBegin(version=4, encoding="full"))
    message, _ = sent.pieces[0]
    with pytest.raises(HetrlError) as refused:
        add(weights, message, bytes(41))
    for piece in sent.pieces[1:]:
        add(weights, *piece)
    with pytest.raises(HetrlError) as ended:
        weights.end(sent.end)
    assert str(ended.value) == str(refused.value)
    assert str(refused.value) == "weight version 4: tensor a: 41 bytes at 0 are not the 16 announced"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": 3}, "2 tensors of 88 bytes came, sent 3 of 88"),
        ({"bytes": 87}, "2 tensors of 88 bytes came, sent 2 of 87"),
        ({"digest": "0" * 32}, f"sent as {'0' * 32}"),
        ({"version": 5}, "weight version 5 ended, but version 4 is arriving"),
    ],
)
def test_an_end_that_disagrees_is_refused(tmp_path, change, message) -> None:
    sent = small()
    fields = {name: getattr(sent.end, name) for name in ("version", "tensors", "bytes", "digest")}
    weights = WeightFile(tmp_path, MOST)
    weights.begin(WeightsBegin(version=4, encoding="full"))
    for piece in sent.pieces:
        add(weights, *piece)
    with pytest.raises(HetrlError, match=message):
        weights.end(WeightsEnd(**{**fields, **change}))
    assert list(tmp_path.glob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec("w", "float32", (3,), 11), "takes 12 bytes, 11 announced"),
        (TensorSpec("w", "float8", (3,), 3), "dtype 'float8' is not one of"),
        (TensorSpec("w", "uint8", (-1, -3), 3), "3 announced"),
        (TensorSpec("__metadata__", "uint8", (3,), 3), "cannot be written"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(tmp_path, spec, message) -> None:
    weights = WeightFile(tmp_path, MOST)
    weights.begin(WeightsBegin(version=1, encoding="full"))
    with pytest.raises(HetrlError, match=f"weight version 1: tensor {spec.name}: .*{message}"):
        add(weights, WeightsTensor(version=1, tensor=spec, offset=0, bytes=0, digest=""), b"")


def test_pieces_of_another_version_are_refused(tmp_path) -> None:
    sent = small()
    weights = WeightFile(tmp_path, MOST)
    with pytest.raises(HetrlError, match="weight version 4: tensor a came before any version began"):
        add(weights, *sent.pieces[0])
    weights.begin(WeightsBegin(version=5, encoding="full"))
    with pytest.raises(HetrlError, match="weight version 4: tensor a came during version 5"):
        add(weights, *sent.pieces[0])


def test_an_unknown_encoding_is_refused(tmp_path) -> None:
    with pytest.raises(HetrlError, match="weight version 6: encoding 'zip' cannot be read; send full or delta"):
        WeightFile(tmp_path, MOST).begin(WeightsBegin(version=6, encoding="zip"))


def test_digests_are_blake3_of_16_bytes_joined_in_the_order_of_names_and_bytes() -> None:
    # The empty digest is that of BLAKE3's test vectors.
    assert digest_of(b"") == "af1349b9f5f9a1a6a0404dea36dcc949"
    leaves = {("b", 0): "22", ("a", 10): "33", ("a", 9): "11"}
    lines = "a|9|11\na|10|33\nb|0|22\n".replace("|", "\0")
    assert version_digest(leaves) == digest_of(lines.encode())


def test_a_version_cannot_be_larger_than_the_model(tmp_path) -> None:
    weights = WeightFile(tmp_path, 100)
    whole = cut(1, {"a": numpy.zeros(10), "b": numpy.zeros(3)}, 80)
    with pytest.raises(HetrlError, match="weight version 1: tensor b: with it the version has more than 100 bytes"):
        arrive(weights, whole)
    spec = TensorSpec(name="a", dtype="float32", shape=(2**58,), bytes=2**60)
    weights.begin(WeightsBegin(version=2, encoding="full"))
    with pytest.raises(HetrlError, match="tensor a: with it the version has more than 100 bytes"):
        add(weights, WeightsTensor(version=2, tensor=spec, offset=2**59, bytes=1, digest="d"), b"x")
    with pytest.raises(HetrlError, match="more than 100 bytes"):
        weights.end(WeightsEnd(version=2, tensors=1, bytes=1, digest="d"))
    assert list(tmp_path.iterdir()) == []


def test_no_version_of_the_catalogue_is_too_large() -> None:
    for name in ("tiny-qwen3", "qwen3-8b", "llama-3.1-70b"):
        model = architecture(name)
        assert most_bytes(model) > 4 * (model.parameters + model.head_parameters)


def test_a_disk_that_is_full_costs_the_version_and_not_the_receiver(tmp_path, monkeypatch) -> None:
    weights = WeightFile(tmp_path, MOST)
    first, _ = arrive(weights, small())

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(HetrlError, match=r"cannot be written to .*version-9.part \(No space left on device\)"):
            arrive(weights, cut(9, {"a": numpy.arange(9)}, 8))
    assert list(tmp_path.iterdir()) == [first]
    arrive(weights, cut(10, {"a": numpy.arange(9)}, 8))
