from __future__ import annotations

import numpy
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as st_numpy

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.wire import arrays

_ARRAYS = st.sampled_from(sorted(arrays.DTYPES)).flatmap(
    lambda name: st_numpy.arrays(
        dtype=st.sampled_from([numpy.dtype(name).newbyteorder(order) for order in "<>"]),
        shape=st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    )
)


def _spec(dtype: str, *shape: int) -> wire.ArraySpec:
    return wire.ArraySpec(name="a", dtype=dtype, shape=shape)


@given(st.dictionaries(st.text(max_size=5), _ARRAYS, max_size=3), st.booleans())
def test_what_is_packed_is_unpacked(given_arrays: dict[str, numpy.ndarray], transposed: bool) -> None:
    sent = {name: array.T if transposed else array for name, array in given_arrays.items()}
    specs, buffers = arrays.pack(sent)
    received = arrays.unpack(specs, [bytes(buffer) for buffer in buffers])
    assert list(received) == list(sent)
    for name, array in sent.items():
        assert received[name].dtype == array.dtype.newbyteorder("<")
        assert received[name].shape == array.shape
        assert received[name].tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()


def test_a_plain_array_is_not_copied() -> None:
    tokens = numpy.zeros((2, 3), dtype=numpy.int64)
    specs, buffers = arrays.pack({"tokens": tokens})
    tokens[1, 2] = 7
    assert arrays.unpack(specs, buffers)["tokens"][1, 2] == 7


@pytest.mark.parametrize("array", [numpy.array([{}]), numpy.array(["x"]), numpy.array([1j])])
def test_other_dtypes_are_not_sent(array: numpy.ndarray) -> None:
    with pytest.raises(HetrlError, match="cannot be sent"):
        arrays.pack({"a": array})


@pytest.mark.parametrize(
    ("spec", "buffer", "said"),
    [
        (_spec("float32", 2), b"\0" * 7, "takes 8 bytes, 7 arrived"),
        (_spec("object", 1), b"\0" * 8, "dtype 'object' is not one of"),
        (_spec("O", 1), b"\0" * 8, "dtype 'O' is not one of"),
        (_spec("int8", -1, -4), b"\0" * 4, "negative"),
        (_spec("int8", 2**40, 2**40), b"", "takes"),
        (_spec("int64", 2**61 + 1, 8), b"\0" * 64, "takes"),
        (_spec("int8", 0, 2**80), b"", "impossible"),
        (_spec("int8", *[1] * 100), b"\0", "impossible"),
    ],
)
def test_what_does_not_match_is_refused(spec: wire.ArraySpec, buffer: bytes, said: str) -> None:
    with pytest.raises(HetrlError, match=said):
        arrays.unpack([spec], [buffer])


def test_the_number_and_the_names_of_arrays_must_match() -> None:
    with pytest.raises(HetrlError, match="1 arrays are described but 2 buffers"):
        arrays.unpack([_spec("int8", 1)], [b"a", b"b"])
    with pytest.raises(HetrlError, match="twice"):
        arrays.unpack([_spec("int8", 1)] * 2, [b"a", b"b"])
