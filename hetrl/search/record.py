"""Named tuples of arrays for compiled code, passed as one pointer.

Numba takes a named tuple apart into all its arrays at each call, which costs minutes of compilation where there are
dozens. A *record* is the same fields behind one pointer (`numba.experimental.structref`); it shares the arrays with the
named tuple that it was made of, so Python reads and writes those.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.experimental import structref


@structref.register
class RecordType(types.StructRef):  # type: ignore[misc]
    """Numba's type of all records; two are equal if their fields are."""

    def preprocess_fields(self, fields: Any) -> Any:
        """Return the fields with numbers as variables, not as constants."""
        return tuple((name, types.unliteral(kind)) for name, kind in fields)


class Record(structref.StructRefProxy):  # type: ignore[misc]
    """A record as Python holds it: to be passed on only."""


structref.define_boxing(RecordType, Record)


def record_of(named: Any) -> Any:
    """Return a class that compiled code calls with the fields of the named tuple class `named` to make a record."""
    maker = type(f"{named.__name__}Record", (), {})
    structref.define_constructor(maker, RecordType, named._fields)
    return maker
