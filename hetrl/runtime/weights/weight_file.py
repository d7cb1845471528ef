"""Weights of one version between the wire and a file on the node: cut into pieces, checked, assembled as safetensors.

The file that arrives has the layout of https://github.com/huggingface/safetensors ("Format"): the header's length in
8 bytes, a JSON header padded with spaces, the tensors' bytes. Room for the header is kept ahead of the bytes, so that
every piece is written to its final place the moment it arrives, in whatever order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetrl.errors import HetrlError
from hetrl.runtime.transport.chunks import Buffer, flat
from hetrl.runtime.wire import TensorSpec, WeightsBegin, WeightsEnd, WeightsTensor
from hetrl.workload import Architecture

# Bytes kept for the length and the header: enough for some 30,000 tensors at about 130 bytes each.
HEADER_BYTES = 4 * 2**20
READ_BYTES = 2**20

# numpy or torch name -> (safetensors name, bytes per element)
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


def digest_of(data: Buffer) -> str:
    """Return the blake2b-128 digest of a buffer in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_of_digests(digests: dict[str, str]) -> str:
    """Return the digest of a whole version: blake2b-128 over the tensors' hex digests, joined in the order of names."""
    return digest_of("".join(digests[name] for name in sorted(digests)).encode())


def digest_of_file(path: Path) -> str:
    """Return the blake2b-128 digest of a file in hex, read piece by piece; raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return _digest_of_range(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def most_bytes(model: Architecture) -> int:
    """Return the bytes that no version of a model reaches: twice its parameters in float32, and some."""
    return 2 * 4 * model.parameters + 2**20


def pieces(
    version: int, name: str, dtype: str, shape: Sequence[int], data: memoryview, chunk_bytes: int
) -> Iterator[tuple[WeightsTensor, memoryview]]:
    """Cut one tensor (C-contiguous, little-endian) into messages of at most `chunk_bytes`; an empty one is one piece.

    `dtype` is a numpy or torch name, bfloat16 included. Raises HetrlError when `data` is not as long as the shape says.
    """
    data = flat(data)
    spec = TensorSpec(name=name, dtype=dtype, shape=tuple(shape), bytes=data.nbytes)
    _check_spec(spec, version)
    digest = digest_of(data)
    for offset in range(0, max(data.nbytes, 1), chunk_bytes):
        message = WeightsTensor(version=version, tensor=spec, offset=offset, digest=digest)
        yield message, data[offset : offset + chunk_bytes]


@dataclass
class _Arrival:
    """One tensor on its way: its place in the data section and the pieces that are there (offset -> bytes)."""

    spec: TensorSpec
    digest: str
    start: int
    pieces: dict[int, int] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return sum(self.pieces.values()) == self.spec.bytes


class WeightFile:
    """Writes the version that arrives to `directory` (made 0700); only the newest complete version stays there.

    A version in which anything is wrong is dropped as a whole: its remaining pieces are ignored and `end` says why.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Take versions of at most so many bytes."""
        self._directory, self._most_bytes = directory, most_bytes
        self._version: int | None = None
        self._cause: str | None = None
        self._descriptor: int | None = None
        self._arrivals: dict[str, _Arrival] = {}
        self._bytes = 0

    def begin(self, begin: WeightsBegin) -> None:
        """Start a version; an unfinished one is dropped. Raises HetrlError for an encoding other than full."""
        self._discard()
        self._version, self._cause, self._arrivals, self._bytes = begin.version, None, {}, 0
        if begin.encoding != "full":
            raise self._reject(f"encoding {begin.encoding!r} cannot be read; send the full set")
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Read as well: a digest is taken of what stands in the file, not of what came.
        self._descriptor = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def add(self, message: WeightsTensor, buffer: Buffer) -> None:
        """Write one piece; a tensor's digest is checked when its last piece arrives.

        Raises HetrlError that names the tensor and the version when the piece does not fit what came before it, comes
        twice, or completes a tensor with another digest. Pieces of a version that was dropped are ignored.
        """
        if message.version != self._version:
            raise HetrlError(
                f"weight version {message.version}: tensor {message.tensor.name} came "
                f"{'before any version began' if self._version is None else f'during version {self._version}'}"
            )
        if self._cause is not None:
            return
        spec, size = message.tensor, memoryview(buffer).nbytes
        try:
            arrival = self._arrival(message)
        except HetrlError as error:
            raise self._reject(str(error)) from None
        if message.offset in arrival.pieces or (arrival.complete and arrival.pieces):
            raise self._reject(f"tensor {spec.name}: the piece at byte {message.offset} came twice")
        if message.offset < 0 or message.offset + size > spec.bytes:
            raise self._reject(f"tensor {spec.name}: {size} bytes at {message.offset} lie outside its {spec.bytes}")
        try:
            _write(self._open_descriptor, buffer, HEADER_BYTES + arrival.start + message.offset)
        except OSError as error:
            raise self._reject(f"tensor {spec.name}: cannot be written to {self._part} ({error.strerror})") from None
        arrival.pieces[message.offset] = size
        if arrival.complete:
            self._check_digest(arrival)

    def end(self, end: WeightsEnd) -> tuple[Path, str]:
        """Close the version: return its file and the file's blake2b-128 digest (hex); older files are removed.

        Raises HetrlError that names the version, and the tensor where there is one, when a piece was refused, a tensor
        is missing or incomplete, or the number, the bytes or the digest of digests differ from what was sent.
        """
        if end.version != self._version:
            raise HetrlError(f"weight version {end.version} ended, but version {self._version} is arriving")
        if self._cause is not None:
            raise HetrlError(self._cause)
        for name, arrival in self._arrivals.items():
            if not arrival.complete:
                arrived = sum(arrival.pieces.values())
                raise self._reject(f"tensor {name}: {arrived} of {arrival.spec.bytes} bytes arrived")
        counted = (len(self._arrivals), self._bytes)
        if counted != (end.tensors, end.bytes):
            raise self._reject(f"{counted[0]} tensors of {counted[1]} bytes came, sent {end.tensors} of {end.bytes}")
        digest = digest_of_digests({name: arrival.digest for name, arrival in self._arrivals.items()})
        if digest != end.digest:
            raise self._reject(f"the digest of its tensors is {digest}, sent as {end.digest}")
        return self._finish()

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
            _check_spec(spec, message.version)
            if self._bytes + spec.bytes > self._most_bytes:
                raise HetrlError(f"tensor {spec.name}: with it the version has more than {self._most_bytes} bytes")
            arrival = _Arrival(spec, message.digest, start=self._bytes)
            self._arrivals[spec.name] = arrival
            self._bytes += spec.bytes
        if (arrival.spec, arrival.digest) != (spec, message.digest):
            raise HetrlError(f"tensor {spec.name}: its pieces disagree on dtype, shape or digest")
        return arrival

    def _check_digest(self, arrival: _Arrival) -> None:
        found = _digest_of_range(self._open_descriptor, HEADER_BYTES + arrival.start, arrival.spec.bytes)
        if found != arrival.digest:
            raise self._reject(f"tensor {arrival.spec.name}: arrived with digest {found}, sent as {arrival.digest}")

    def _finish(self) -> tuple[Path, str]:
        header, count = _header(list(self._arrivals.values())), len(self._arrivals)
        if len(header) > HEADER_BYTES:
            raise self._reject(f"{count} tensors need a header of {len(header)} bytes, room {HEADER_BYTES}")
        _write(self._open_descriptor, header.ljust(HEADER_BYTES), 0)
        digest = _digest_of_range(self._open_descriptor, 0, HEADER_BYTES + self._bytes)
        path = self._directory / f"version-{self._version}.safetensors"
        os.close(self._open_descriptor)
        self._descriptor = None
        self._part.rename(path)
        for other in self._directory.glob("version-*.safetensors"):
            if other != path:
                other.unlink()
        self._version = None
        return path, digest

    def _reject(self, what: str) -> HetrlError:
        self._cause = f"weight version {self._version}: {what.removeprefix(f'weight version {self._version}: ')}"
        self._discard()
        return HetrlError(self._cause)

    def _discard(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._part.unlink(missing_ok=True)


def _check_spec(spec: TensorSpec, version: int) -> None:
    """Raise HetrlError for a dtype without a name here, a reserved name, or bytes that shape and dtype do not make."""
    where = f"weight version {version}: tensor {spec.name}"
    if spec.dtype not in DTYPES:
        raise HetrlError(f"{where}: dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
    if not spec.name or spec.name == "__metadata__":
        raise HetrlError(f"{where}: this name cannot be written")
    expected = math.prod(spec.shape) * DTYPES[spec.dtype][1]
    if expected != spec.bytes or any(extent < 0 for extent in spec.shape):
        raise HetrlError(f"{where}: {spec.dtype} {list(spec.shape)} takes {expected} bytes, {spec.bytes} announced")


def _header(arrivals: list[_Arrival]) -> bytes:
    """Return the length and the JSON header; the length counts the padding up to HEADER_BYTES."""
    entries = {
        arrival.spec.name: {
            "dtype": DTYPES[arrival.spec.dtype][0],
            "shape": arrival.spec.shape,
            "data_offsets": (arrival.start, arrival.start + arrival.spec.bytes),
        }
        for arrival in arrivals
    }
    return (HEADER_BYTES - 8).to_bytes(8, "little") + json.dumps(entries, separators=(",", ":")).encode()


def _write(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all of a buffer at a place of the file."""
    rest = flat(data)
    while rest.nbytes:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def _digest_of_range(descriptor: int, offset: int, size: int) -> str:
    """Return the digest of `size` bytes of a file from `offset`."""
    digest = hashlib.blake2b(digest_size=16)
    end = offset + size
    while offset < end:
        block = os.pread(descriptor, min(READ_BYTES, end - offset), offset)
        if not block:
            raise HetrlError(f"the file ends {end - offset} bytes early")
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()
