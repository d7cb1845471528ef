"""Weights of one version between the wire and a file on the node: cut into pieces, checked, assembled as safetensors.

Room for the header (`safetensors_file`) is kept ahead of the bytes, so that every piece is written to its final place
the moment it arrives, in whatever order. What changed since the version before is applied to a copy of each piece: the
file of that version stays as it is until the next one is proven.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from hetrl.errors import HetrlError
from hetrl.runtime.transport.chunks import Buffer, flat
from hetrl.runtime.weights.digests import digest_of, version_digest
from hetrl.runtime.weights.pieces import check_spec, word_bytes
from hetrl.runtime.weights.safetensors_file import HEADER_BYTES, Places, header_of, places_of, read_at, write_at
from hetrl.runtime.wire import TensorSpec, WeightsBegin, WeightsEnd, WeightsTensor, changes
from hetrl.workload import Architecture

MOST_CHANGED_BYTES = 2**26  # of a piece that comes as changes: it is held in memory


def most_bytes(model: Architecture) -> int:
    """Return the bytes that no version of a model reaches: twice its parameters in float32, and some."""
    return 2 * 4 * model.parameters + 2**20


@dataclass
class _Arrival:
    """One tensor on its way: its place in the data section and the pieces that are there (offset -> bytes)."""

    spec: TensorSpec
    start: int
    pieces: dict[int, int] = field(default_factory=dict)

    @property
    def gap(self) -> int | None:
        """Return the first byte that no piece, or more than one, has; None where each has one."""
        end = 0
        for offset in sorted(self.pieces):
            if offset != end:
                return min(offset, end)
            end += self.pieces[offset]
        return None if end == self.spec.bytes else end


@dataclass(frozen=True)
class Held:
    """A version that was proven: its file, its digest, and where its tensors stand in the data section."""

    version: int
    digest: str
    path: Path
    places: Places


@dataclass(frozen=True)
class Piece:
    """A piece that was admitted: what is to be written at a byte of the file; `base_at` is its place in the base."""

    message: WeightsTensor
    at: int
    base_at: int | None


class WeightFile:
    """Writes the version that arrives to `directory` (made 0700); only the newest proven version stays there.

    A version in which anything is wrong is dropped as a whole: its remaining pieces are ignored and `end` says why. The
    one before stays what it was. `write` may run on several threads; all else on one, with no `write` under way.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Take versions of at most so many bytes."""
        self._directory, self._most_bytes = directory, most_bytes
        self._version: int | None = None
        self._cause: str | None = None
        self._descriptor: int | None = None
        self._base: int | None = None  # the open file of what is held, where a delta arrives
        self._arrivals: dict[str, _Arrival] = {}
        self._leaves: dict[tuple[str, int], str] = {}
        self._bytes = 0
        self.held: Held | None = None

    def begin(self, begin: WeightsBegin) -> None:
        """Start a version; an unfinished one is dropped.

        Raises HetrlError for an unknown encoding, for a delta whose base is not the version that is held, and where no
        file can be written.
        """
        self._discard()
        self._version, self._cause, self._bytes = begin.version, None, 0
        self._arrivals, self._leaves = {}, {}
        if begin.encoding not in ("full", "delta"):
            raise self.reject(f"encoding {begin.encoding!r} cannot be read; send full or delta")
        held = self.held
        if begin.encoding == "delta":
            if held is None or (begin.base_version, begin.base_digest) != (held.version, held.digest):
                here = f"version {held.version} ({held.digest})" if held else "no version"
                raise self.reject(f"its base is version {begin.base_version} ({begin.base_digest}), here is {here}")
            try:
                self._base = os.open(held.path, os.O_RDONLY)
            except OSError as error:
                self.held = None
                raise self.reject(f"its base {held.path} cannot be read ({error.strerror})") from None
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Read as well: a digest is taken of what stands in the file, not of what came.
            self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise self.reject(f"{self._part} cannot be written ({error.strerror})") from None

    def admit(self, message: WeightsTensor, size: int) -> Piece | None:
        """Give a piece whose buffer has `size` bytes its place; None: its version was dropped.

        Raises HetrlError that names the tensor and the version when the piece does not fit what came before it, or
        comes twice.
        """
        if message.version != self._version:
            raise HetrlError(
                f"weight version {message.version}: tensor {message.tensor.name} came "
                f"{'before any version began' if self._version is None else f'during version {self._version}'}"
            )
        if self._cause is not None:
            return None
        try:
            arrival = self._arrival(message)
            base_at = self._checked(message, arrival, size)
        except HetrlError as error:
            raise self.reject(str(error)) from None
        arrival.pieces[message.offset] = message.bytes
        self._leaves[message.tensor.name, message.offset] = message.digest
        return Piece(message, HEADER_BYTES + arrival.start + message.offset, base_at)

    def write(self, piece: Piece, buffer: Buffer) -> None:
        """Write a piece to its place and check the digest of what stands there then.

        Raises HetrlError, which `reject` is to be told, where it is another one or cannot be written.
        """
        message, descriptor = piece.message, self._open_descriptor
        where = f"weight version {message.version}: tensor {message.tensor.name}"
        try:
            content = buffer if piece.base_at is None else self._changed(piece, buffer)
            write_at(descriptor, content, piece.at)
            found = digest_of(read_at(descriptor, piece.at, message.bytes))
        except OSError as error:
            raise HetrlError(f"{where}: cannot be written to {self._part} ({error.strerror})") from None
        except HetrlError as error:
            raise HetrlError(f"{where}: {error}") from None
        if found != message.digest:
            raise HetrlError(f"{where}: byte {message.offset} arrived with digest {found}, sent as {message.digest}")

    def end(self, end: WeightsEnd) -> tuple[Path, str]:
        """Close the version: return its file and its digest; older files are removed.

        Raises HetrlError that names the version, and the tensor where there is one, when a piece was refused, a tensor
        is missing or incomplete, or the number, the bytes or the digest differ from what was sent.
        """
        if end.version != self._version:
            raise HetrlError(f"weight version {end.version} ended, but version {self._version} is arriving")
        try:
            return self._proven(end)
        except HetrlError:
            self._discard()
            raise

    def _proven(self, end: WeightsEnd) -> tuple[Path, str]:
        if self._cause is not None:
            raise HetrlError(self._cause)
        for name, arrival in self._arrivals.items():
            if (gap := arrival.gap) is not None:
                raise self.reject(f"tensor {name}: byte {gap} of {arrival.spec.bytes} did not arrive once")
        counted = (len(self._arrivals), self._bytes)
        if counted != (end.tensors, end.bytes):
            raise self.reject(f"{counted[0]} tensors of {counted[1]} bytes came, sent {end.tensors} of {end.bytes}")
        digest = version_digest(self._leaves)
        if digest != end.digest:
            raise self.reject(f"the digest of its pieces is {digest}, sent as {end.digest}")
        return self._finish(digest)

    def adopt(self, proven: Path, version: int, digest: str) -> Path:
        """Hold a version that another replica of this node proved, under a name of its own; return its file.

        Raises HetrlError where the file is gone, or is none that was written here.
        """
        self._discard()
        path = self._directory / f"version-{version}.safetensors"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            os.link(proven, path)
            places = places_of(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HetrlError(f"weight version {version}: {proven} cannot be taken over ({error!r})") from None
        self._version = None
        self._hold(Held(version, digest, path, places))
        return path

    def reject(self, what: str) -> HetrlError:
        """Refuse the version that arrives; return the error, which `end` will raise when it drops the file.

        Threads may still write to it.
        """
        self._cause = f"weight version {self._version}: {what.removeprefix(f'weight version {self._version}: ')}"
        return HetrlError(self._cause)

    @property
    def _part(self) -> Path:
        return self._directory / f"version-{self._version}.part"

    @property
    def _open_descriptor(self) -> int:
        assert self._descriptor is not None  # begin() opened it, and a rejected version does not get here
        return self._descriptor

    def _arrival(self, message: WeightsTensor) -> _Arrival:
        """Return the tensor that a piece belongs to, giving it its place when this is the first one."""
        spec = message.tensor
        arrival = self._arrivals.get(spec.name)
        if arrival is None:
            check_spec(spec, message.version)
            if self._bytes + spec.bytes > self._most_bytes:
                raise HetrlError(f"tensor {spec.name}: with it the version has more than {self._most_bytes} bytes")
            arrival = _Arrival(spec, start=self._bytes)
            self._arrivals[spec.name] = arrival
            self._bytes += spec.bytes
        if arrival.spec != spec:
            raise HetrlError(f"tensor {spec.name}: its pieces disagree on dtype or shape")
        return arrival

    def _checked(self, message: WeightsTensor, arrival: _Arrival, size: int) -> int | None:
        """Hold a piece against its tensor; return where its base stands in the file of what is held, for changes."""
        name, offset, extent, whole = message.tensor.name, message.offset, message.bytes, arrival.spec.bytes
        if offset in arrival.pieces:
            raise HetrlError(f"tensor {name}: the piece at byte {offset} came twice")
        if offset < 0 or extent < min(whole, 1) or offset + extent > whole:
            raise HetrlError(f"tensor {name}: {extent} bytes at {offset} lie outside its {whole}")
        if not message.changes:
            if size != extent:
                raise HetrlError(f"tensor {name}: {size} bytes at {offset} are not the {extent} announced")
            return None
        word = word_bytes(message.tensor)
        if word is None or offset % word or extent % word or extent > MOST_CHANGED_BYTES:
            raise HetrlError(f"tensor {name}: {extent} bytes at {offset} cannot come as changes")
        spec, start = self.held.places.get(name, (None, 0)) if self.held and self._base is not None else (None, 0)
        if spec != message.tensor:
            raise HetrlError(f"tensor {name}: came as changes, but the base has {spec or 'nothing of this name'}")
        return HEADER_BYTES + start + offset

    def _changed(self, piece: Piece, payload: Buffer) -> Buffer:
        """Return the bytes of a piece that came as changes."""
        assert self._base is not None and piece.base_at is not None  # admit() saw to it
        content = bytearray(read_at(self._base, piece.base_at, piece.message.bytes))
        changes.apply(numpy.frombuffer(content, f"<u{word_bytes(piece.message.tensor)}"), flat(payload))
        return content

    def _finish(self, digest: str) -> tuple[Path, str]:
        places = {name: (arrival.spec, arrival.start) for name, arrival in self._arrivals.items()}
        header, count = header_of(places), len(places)
        if len(header) > HEADER_BYTES:
            raise self.reject(f"{count} tensors need a header of {len(header)} bytes, room {HEADER_BYTES}")
        path = self._directory / f"version-{self._version}.safetensors"
        try:
            write_at(self._open_descriptor, header.ljust(HEADER_BYTES), 0)
            self._part.rename(path)
        except OSError as error:
            raise self.reject(f"{self._part} cannot be completed ({error.strerror})") from None
        assert self._version is not None
        self._close()
        self._hold(Held(self._version, digest, path, places))
        self._version = None
        return path, digest

    def _hold(self, held: Held) -> None:
        self.held = held
        for other in self._directory.glob("version-*.safetensors"):
            if other != held.path:
                with suppress(OSError):  # what is there too long takes room, and the next version tries again
                    other.unlink()

    def _discard(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # as in `_hold`
                self._part.unlink()
        self._close()

    def _close(self) -> None:
        for descriptor in (self._descriptor, self._base):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptor = self._base = None
