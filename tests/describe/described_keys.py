"""The keys that a file may have, by the model that it is read into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

Key = tuple[str | int, ...]


def keys(kind: Any, prefix: Key = ()) -> Iterator[Key]:
    """Yield every key below a model; 0 stands for the first entry of a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            key = (*prefix, field.alias or name)
            yield key
            yield from keys(field.annotation, key)
    for part in get_args(kind):
        yield from keys(part, (*prefix, 0) if get_origin(kind) in (list, tuple) else prefix)
