"""What a trainer keeps of the versions that it published: the newest one whole, what changed before, and who has which.

A version that is sent to those that are behind stays what it was while newer ones are kept: what of it is not sent yet
is copied before it is written over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
from numpy.typing import NDArray

from hetrl.runtime import wire
from hetrl.runtime.weights.pieces import word_bytes

DELTAS_SHARE = 0.25  # of the bytes of a version: what changed before takes no more host memory than that

_Place = tuple[str, int]  # tensor and offset


@dataclass(frozen=True)
class Cut:
    """A piece as it goes: whole to those without the base, as `changes` (where they are fewer bytes) to the others."""

    message: wire.WeightsTensor
    changes: bytes | None = None
    words: int = 0
    changed: int = 0


@dataclass(frozen=True)
class Delta:
    """What makes a version of its base: pieces as changes, or whole where all of them changed."""

    base: int
    base_digest: str
    version: int
    digest: str
    pieces: Sequence[tuple[wire.WeightsTensor, bytes]]

    @property
    def bytes(self) -> int:
        """Return what it takes of memory, and of a link."""
        return sum(len(data) for _, data in self.pieces)


class Anchor:
    """A version as it was when it was taken, whatever is kept meanwhile; each piece is read once."""

    def __init__(self, kept: Kept, version: int) -> None:
        """Take the version that is kept, with the lock."""
        self.version, self.digest, self.messages = version, kept.digest, [*kept.pieces.values()]
        self._tensors, self._lock = dict(kept.tensors), kept.lock
        self._unread = set(kept.pieces)
        self._saved: dict[_Place, bytes] = {}

    def read(self, message: wire.WeightsTensor) -> bytes:
        """Return the bytes of a piece."""
        place = message.tensor.name, message.offset
        with self._lock:
            self._unread.discard(place)
            if (saved := self._saved.pop(place, None)) is not None:
                return saved
            return self._tensors[place[0]][place[1] : place[1] + message.bytes].tobytes()

    def lacks(self, place: _Place) -> bool:
        """Return whether a piece is still to be read, and was not saved; called with the lock."""
        return place in self._unread and place not in self._saved

    def save(self, place: _Place, held: bytes) -> None:
        """Keep what is about to be written over; called with the lock."""
        self._saved[place] = held


@dataclass
class Kept:
    """One copy of the weights in host memory; without a `version` it is none, or half of one.

    `tensors` are raw bytes, `pieces` the messages that they go in, by tensor and offset. `proven` has the newest
    version that each member proved, `words` the last that it said of one; for those that are `behind` what changed
    since is kept while there is room for it.
    """

    version: int | None = None
    digest: str = ""
    tensors: dict[str, NDArray[numpy.uint8]] = field(default_factory=dict)
    pieces: dict[_Place, wire.WeightsTensor] = field(default_factory=dict)
    proven: dict[str, int] = field(default_factory=dict)
    words: dict[str, wire.WeightsApplied] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    deltas: dict[int, Delta] = field(default_factory=dict)  # by their bases
    anchors: list[Anchor] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bytes(self) -> int:
        """Return the bytes of the full set."""
        return sum(message.bytes for message in self.pieces.values())

    def holders(self) -> frozenset[str]:
        """Return the members that have the version that is kept."""
        return frozenset(one for one, version in self.proven.items() if version == self.version)

    def followers(self, receivers: Iterable[str]) -> frozenset[str]:
        """Return those of some receivers that need no pieces: another one of their node, among these, takes them."""
        said = {one: self.words[one] for one in receivers if one in self.words and one in self.proven}
        led = {(wire.site_of(one), word.node) for one, word in said.items() if word.node and not word.follows}
        return frozenset(one for one, word in said.items() if word.follows and (wire.site_of(one), word.node) in led)

    def room_for(self, spec: wire.TensorSpec) -> tuple[NDArray[numpy.uint8], bool]:
        """Return the bytes that are kept of a tensor, and whether they are those of the last version."""
        held = self.tensors.get(spec.name)
        if held is not None and held.nbytes == spec.bytes:
            return held, True
        self.tensors[spec.name] = numpy.zeros(spec.bytes, numpy.uint8)
        return self.tensors[spec.name], False

    def replace(self, place: _Place, held: NDArray[numpy.uint8], data: memoryview | NDArray[numpy.uint8]) -> None:
        """Write a piece over the one that was kept in its place."""
        if not self.anchors:
            held[:] = data
            return
        with self.lock:
            if lacking := [anchor for anchor in self.anchors if anchor.lacks(place)]:
                copy = held.tobytes()  # one for all of them
                for anchor in lacking:
                    anchor.save(place, copy)
            held[:] = data

    def whole(self, message: wire.WeightsTensor) -> memoryview:
        """Return the bytes of a piece."""
        data: memoryview = self.tensors[message.tensor.name][message.offset : message.offset + message.bytes].data
        return data

    def begin(self) -> None:
        """Keep no version until all of the next one is taken."""
        with self.lock:
            self.version, self.pieces = None, {}

    def forget(self) -> None:
        """Keep no version: the weights become others under numbers that there may have been."""
        with self.lock:
            self.version = None
            self.proven.clear()
            self.deltas.clear()

    # ---- for those that are behind

    @contextmanager
    def anchor(self) -> Iterator[Anchor | None]:
        """Give the version that is kept, as it stays meanwhile; None while the next one is taken."""
        with self.lock:
            anchor = None if self.version is None else Anchor(self, self.version)
            self.anchors += [] if anchor is None else [anchor]
        try:
            yield anchor
        finally:
            self.anchors = [one for one in self.anchors if one is not anchor]

    def remember(self, delta: Delta) -> None:
        """Keep what changed, in the place of the oldest that there is no room for."""
        with self.lock:
            self.deltas[delta.base] = delta
            while sum(one.bytes for one in self.deltas.values()) > DELTAS_SHARE * self.bytes:
                del self.deltas[min(self.deltas)]

    def since(self, version: int | None) -> list[Delta]:
        """Return what makes the version that is kept of another one; nothing where that is not known any more."""
        found = list[Delta]()
        with self.lock:
            while version in self.deltas:
                found.append(self.deltas[version])
                version = found[-1].version
            return found if version == self.version else []

    def settle(self) -> None:
        """Forget what changed where nobody is behind."""
        if not self.behind:
            with self.lock:
                self.deltas.clear()


def words(data: NDArray[Any], spec: wire.TensorSpec) -> NDArray[Any]:
    """Return bytes as the words of a tensor."""
    return data.view(f"<u{word_bytes(spec)}")
