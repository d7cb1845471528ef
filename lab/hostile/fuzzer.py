"""Frames that nobody of a run sends: every message from every role to every role, as it should be, wrong, or garbled.

Of one seed the frames are the same in every run.
"""

from __future__ import annotations

import functools
import random
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hetrl.runtime import wire

_fields = functools.cache(msgspec.structs.fields)

MESSAGES: tuple[type[wire.Tagged], ...] = typing.get_args(wire.Message)
_NUMBERS = (0, 1, -1, 2, 7, 2**20, 2**31, 2**40, -(2**63), 2**64 - 1)
_TEXTS = ("", "x", "full", "delta", "logprobs", "float32", "alpha", "beta/controller/0", "\n\x1b[2J", "set", "é" * 50)
_NESTED = b"\x91" * 5000  # arrays in arrays


@dataclass(frozen=True)
class Fuzzer:
    """Makes frames of `run` from `sources` to `receivers`."""

    run: str
    sources: Sequence[str]
    receivers: Sequence[str]

    def frames(self, seed: int, count: int) -> Iterator[list[bytes]]:
        """Yield the frames of so many messages: a header, a struct or a chunk of one, now and then a buffer."""
        chance = random.Random(seed)
        for _ in range(count):
            yield self._frames(chance)

    def _frames(self, chance: random.Random) -> list[bytes]:
        struct = wire.encode_struct(value_of(chance.choice(MESSAGES), chance))
        frames = [wire.encode_struct(self._header(chance, len(struct))), struct]
        if chance.random() < 0.2:
            frames.append(chance.randbytes(chance.randrange(40)))
        if chance.random() < 0.2:
            victim = chance.randrange(len(frames))
            frames[victim] = garbled(frames[victim], chance)
        return frames

    def _header(self, chance: random.Random, size_bytes: int) -> wire.Header:
        to = tuple(chance.choices(self.receivers, k=chance.choice((1, 1, 1, 2, 5))))
        chunk = chance.random() < 0.5
        places = tuple(wire.Place(chance.choice((0, 1, 2, 2**40)), chance.randrange(4)) for _ in to)
        sizes = chance.choice(((size_bytes,), (), (size_bytes, 7), (-1,), (2**40,), (1,) * 2000))
        return wire.Header(
            run=self.run if chance.random() < 0.98 else "other",
            source=chance.choice(self.sources),
            to=to,
            id=chance.choice(_NUMBERS),
            reply_to=chance.choice((None, None, 1, 2, 2**40)),
            incarnation=chance.choice((0, 0, 0, 1, 2**61)),
            priority=chance.choice(tuple(wire.Priority)),
            places=places if chunk else (),
            sizes=sizes if chunk else (),
        )


def value_of(kind: Any, chance: random.Random) -> Any:
    """Return a value of an annotated type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: value_of(field.type, chance) for field in _fields(kind)})
    inner, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is tuple and inner[-1] is not ...:
        return tuple(value_of(one, chance) for one in inner)
    if origin is tuple:
        return tuple(value_of(inner[0], chance) for _ in range(chance.choice((0, 1, 2, 30))))
    if origin is dict:
        return {value_of(inner[0], chance): value_of(inner[1], chance) for _ in range(chance.choice((0, 1, 3)))}
    if inner:
        return value_of(chance.choice(inner), chance)
    return _plain(kind, chance)


def _plain(kind: type, chance: random.Random) -> object:
    if kind is type(None):
        return None
    if kind is bool:
        return chance.random() < 0.5
    if kind is wire.Priority:
        return chance.choice(tuple(wire.Priority))
    if kind is int:
        return chance.choice(_NUMBERS)
    if kind is float:
        return chance.choice((0.0, -1.5, 1e300, float("inf"), float("nan")))
    return chance.choice(_TEXTS) if kind is str else chance.randbytes(chance.randrange(20))


def garbled(frame: bytes, chance: random.Random) -> bytes:
    """Return a frame with a part cut off, replaced, doubled or hidden under arrays in arrays."""
    at = chance.randrange(len(frame) + 1)
    return chance.choice(
        (
            frame[:at],
            frame[:at] + chance.randbytes(3) + frame[at + 3 :],
            frame + frame,
            frame[:at] + _NESTED + frame[at:],
            _NESTED,
            b"",
        )
    )
