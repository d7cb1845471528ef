"""Named tuples of numpy arrays as structs of the compiled core: one declaration for both languages.

A field is an `int`, a `float`, a `bool`, another named tuple, or an array whose annotation says its element type and
its dimensions (`Floats2`: two). `declare` writes the C++ struct of a named tuple, `pack` fills one; it shares the
arrays, so each side sees what the other writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

Ints1 = Annotated[npt.NDArray[np.int64], 1]
Ints2 = Annotated[npt.NDArray[np.int64], 2]
Ints3 = Annotated[npt.NDArray[np.int64], 3]
Ints4 = Annotated[npt.NDArray[np.int64], 4]
Floats1 = Annotated[npt.NDArray[np.float64], 1]
Floats2 = Annotated[npt.NDArray[np.float64], 2]
Floats3 = Annotated[npt.NDArray[np.float64], 3]
Floats5 = Annotated[npt.NDArray[np.float64], 5]
Floats6 = Annotated[npt.NDArray[np.float64], 6]
Flags1 = Annotated[npt.NDArray[np.bool_], 1]
Flags2 = Annotated[npt.NDArray[np.bool_], 2]
Genes1 = Annotated[npt.NDArray[np.int32], 1]
Genes2 = Annotated[npt.NDArray[np.int32], 2]
Words1 = Annotated[npt.NDArray[np.uint64], 1]

_ELEMENTS = {np.int64: "Int", np.float64: "double", np.bool_: "bool", np.int32: "std::int32_t", np.uint64: "Word"}
SCALARS: dict[Any, tuple[str, Any]] = {  # as C++ and ctypes know them
    int: ("Int", ctypes.c_int64),
    float: ("double", ctypes.c_double),
    bool: ("bool", ctypes.c_bool),
    type(None): ("void", None),
}
SEQUENCES: dict[Any, Any] = {Sequence[float]: Floats1, Sequence[int]: Ints1, list[int]: Ints1}

Values = TypeVar("Values")


@dataclass(frozen=True)
class Packed(Generic[Values]):
    """A named tuple and its struct, which shares the arrays."""

    values: Values
    struct: ctypes.Structure


@cache
def hints_of(annotated: Hashable) -> dict[str, Any]:
    """Return the annotations of a class or function, with the dimensions of arrays."""
    return get_type_hints(annotated, include_extras=True)


def cpp_type(hint: Any) -> str:
    """Return the C++ type of an annotation."""
    if hint in SCALARS:
        return SCALARS[hint][0]
    if get_origin(hint) is Annotated:
        element, dimensions = _array(hint)
        return f"Array<{_ELEMENTS[element]}, {dimensions}>"
    return str(hint.__name__)


def declare(record: type) -> str:
    """Return the C++ struct of a named tuple."""
    fields = "".join(f"    {cpp_type(hint)} {name};\n" for name, hint in hints_of(record).items())
    return f"struct {record.__name__} {{\n{fields}}};\n"


def records_in(record: type) -> list[type]:
    """Return the named tuples that a named tuple is made of, inner ones first, itself last."""
    inner = [part for hint in hints_of(record).values() if hasattr(hint, "_fields") for part in records_in(hint)]
    return [*inner, record]


def pack(values: Values) -> Packed[Values]:
    """Return a named tuple with its struct. Raises TypeError for an array that is not as its field says."""
    return Packed(values, _fill(values))


def array_struct(hint: Any) -> Callable[[npt.NDArray[Any]], ctypes.Structure]:
    """Return what makes the C++ array of a numpy array of this annotation; it raises TypeError for another one."""
    element, dimensions = _array(hint)
    dtype, struct = np.dtype(element), _array_type(dimensions)
    sizes = ctypes.c_int64 * dimensions

    def make(array: npt.NDArray[Any]) -> ctypes.Structure:
        if array.dtype != dtype or array.ndim != dimensions or not array.flags.c_contiguous:
            raise TypeError(f"an array of {array.dtype}[{array.ndim}] where the core wants {dtype}[{dimensions}]")
        filled: ctypes.Structure = struct(array.ctypes.data, sizes(*array.shape))
        return filled

    return make


def _array(hint: Any) -> tuple[Any, int]:
    """Return the element type and the number of dimensions of an array's annotation."""
    array, dimensions = get_args(hint)
    return get_args(get_args(array)[1])[0], dimensions


@cache
def _array_type(dimensions: int) -> Any:
    fields = [("data", ctypes.c_void_p), ("sizes", ctypes.c_int64 * dimensions)]
    return type(f"Array{dimensions}", (ctypes.Structure,), {"_fields_": fields})


@cache
def _struct_type(record: Any) -> Any:
    fields = [(name, _field_type(hint)) for name, hint in hints_of(record).items()]
    return type(record.__name__, (ctypes.Structure,), {"_fields_": fields})


def _field_type(hint: Any) -> Any:
    if hint in SCALARS:
        return SCALARS[hint][1]
    return _array_type(_array(hint)[1]) if get_origin(hint) is Annotated else _struct_type(hint)


def _fill(values: Any) -> ctypes.Structure:
    found = []
    record: Any = type(values)
    for (name, hint), value in zip(hints_of(record).items(), values, strict=True):
        if hint in SCALARS:
            found.append(value)
        elif get_origin(hint) is Annotated:
            try:
                found.append(array_struct(hint)(value))
            except TypeError as error:
                raise TypeError(f"{record.__name__}.{name}: {error}") from None
        else:
            found.append(_fill(value))
    struct: ctypes.Structure = _struct_type(record)(*found)
    return struct
