"""What every message has in common: its header, the channel that it travels in, and how a buffer is read."""

from __future__ import annotations

import enum

import msgspec

WIRE_FORMAT = "hetrl-wire/1"
NO_ANSWER = 0  # the id of a message whose source wants no word about it, not even Undeliverable


class Priority(enum.IntEnum):
    """The channels between two members; a gateway sends the first ahead of the others, and the last behind them."""

    CONTROL = 0
    DATA = 1
    WEIGHTS = 2
    LATER_WEIGHTS = 3
    BACKGROUND = 4


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a chunk stands in the channel to one receiver: the stream counts how often the channel began anew."""

    stream: int
    sequence: int


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who speaks to whom; `reply_to` carries the `id` of the request that is answered.

    `incarnation` tells the lives of one address apart. A chunk has a place per receiver in `to`, and on the first chunk
    of a message `sizes` are the bytes of its struct and of each buffer. What has no place is outside the channels.
    """

    run: str
    source: str
    to: tuple[str, ...]
    id: int
    reply_to: int | None = None
    format: str = WIRE_FORMAT
    incarnation: int = 0
    priority: Priority = Priority.CONTROL
    places: tuple[Place, ...] = ()
    sizes: tuple[int, ...] = ()


class ArraySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to read one buffer: a C-contiguous array of little-endian `dtype` (numpy or torch name) and `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Tagged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """A message; its class name is its type on the wire."""
