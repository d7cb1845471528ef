"""A checkpoint on its way to its name: its files, the digest of each, and the moment from which it is whole.

begin(directory)        an empty directory with another name
write(path, parts)      each file, by whoever has its bytes, with its digest beside it
finish(directory)       digests and sizes of all; then the name
prove(directory)        of one that was brought here: what arrived is what was written
prove_again(directory)  of one that has its name: it is still that
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from hetrl.errors import HetrlError
from hetrl.runtime.checkpoints.files import COMPLETE, DIGESTS, PARTIAL, partial_of, remove

PART_BYTES = 16 * 2**20
BESIDE = ".digest"  # what the name of a file's digest adds to the file's
Buffer = bytes | memoryview


def begin(directory: Path) -> Path:
    """Make the empty directory in which the files of a checkpoint are written; `finish` gives it its name."""
    partial = partial_of(directory)
    if partial.exists():
        remove(partial)
    partial.mkdir(parents=True)
    return partial


def discard(directory: Path) -> None:
    """Remove what `begin` started, as far as that can be done: a full disk wants the room."""
    shutil.rmtree(partial_of(directory), ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small JSON file and sync it."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


class Writer:
    """A file of a checkpoint on its way to the disk: bytes as they come, then its digest beside it.

    An OSError names the file.
    """

    def __init__(self, path: Path) -> None:
        """Begin the file."""
        self._path, self._hashed, self._file = path, blake3(), path.open("wb")

    def add(self, part: Buffer) -> None:
        """Write what comes next."""
        with self._naming():
            self._file.write(part)
            self._hashed.update(part)

    def finish(self) -> None:
        """Sync the file, and leave its digest beside it."""
        with self._naming():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            beside = self._path.with_name(self._path.name + BESIDE)
            beside.write_text(self._hashed.hexdigest(), encoding="utf-8")

    def close(self) -> None:
        """Let go of the file, whole or not."""
        self._file.close()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.filename is None:  # as of a full disk
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            raise


def write(path: Path, parts: Iterable[Buffer]) -> None:
    """Write a file as its bytes come; an OSError names it."""
    writer = Writer(path)
    try:
        for part in parts:
            writer.add(part)
        writer.finish()
    finally:
        with suppress(OSError):  # of what a full disk did not take, which was raised already
            writer.close()


def finish(directory: Path) -> None:
    """Mark what `begin` started as complete and give it its name; a checkpoint of that name is replaced.

    Raises OSError when the disk fails.
    """
    partial = partial_of(directory)
    write_json(partial / DIGESTS, _digests(partial))
    write_json(partial / COMPLETE, {path.name: path.stat().st_size for path in sorted(partial.iterdir())})
    give_name(directory)


def prove(directory: Path) -> None:
    """Compare what arrived of a checkpoint, which has no name yet, with its own digests; HetrlError names a file."""
    partial = partial_of(directory)
    wanted = _wanted(partial, directory)
    found = _digests(partial)
    for name, digest in wanted.items():
        if found[name] != digest:
            raise HetrlError(f"{directory}: {name} is not what was written: its digest is another one")


def prove_again(directory: Path, share: int = 0, shares: int = 1) -> None:
    """Compare what a checkpoint is now with its digests, of `shares` who do so together this one's share of the files.

    Raises HetrlError, which names the file, for one that is not what was written.
    """
    for name, digest in [*_wanted(directory, directory).items()][share::shares]:
        if _digest(directory / name) != digest:
            raise HetrlError(
                f"{directory.absolute()}: {name} is not what was written: its digest is another one; remove this "
                "checkpoint, and resume: the run then goes on from the one before"
            )


def _digest(path: Path) -> str:
    hashed = blake3(max_threads=blake3.AUTO)
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            hashed.update(part)
    return hashed.hexdigest()


def _wanted(written: Path, directory: Path) -> dict[str, str]:
    """Return the digests of all files of a checkpoint that lies at `written`; HetrlError where they are not all."""
    try:
        wanted = msgspec.json.decode((written / DIGESTS).read_bytes(), type=dict[str, str])
        sizes = msgspec.json.decode((written / COMPLETE).read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise HetrlError(f"{directory}: it is without its digests ({error})") from None
    there = {path.name for path in written.iterdir() if not path.name.endswith(BESIDE)}
    if not there - {DIGESTS, COMPLETE} == wanted.keys() == sizes.keys() - {DIGESTS}:
        raise HetrlError(f"{directory}: its digests are not those of its files")
    return wanted


def _digests(partial: Path) -> dict[str, str]:
    """Return the digests of all files, those that stand beside them and of small files their own; none stays beside."""
    found = {}
    for path in sorted(partial.iterdir()):
        if path.name.endswith(BESIDE):
            found[path.name.removesuffix(BESIDE)] = path.read_text(encoding="utf-8")
            path.unlink()
    found |= {path.name: _digest(path) for path in sorted(partial.iterdir()) if path.name not in found}
    return {name: digest for name, digest in found.items() if name not in (DIGESTS, COMPLETE)}


def give_name(directory: Path) -> None:
    """Let what `begin` started, and what is complete, be the checkpoint; one of that name is replaced."""
    partial = partial_of(directory)
    _sync_directory(partial)
    replaced = directory.with_name(f"{directory.name}.replaced{PARTIAL}")
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    _sync_directory(directory.parent)
    if replaced.exists():
        remove(replaced)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
