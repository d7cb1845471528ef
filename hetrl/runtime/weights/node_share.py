"""A directory in which the replicas of one node share what arrives: one of them takes a version, all of them have it.

    lead.lock                    held by the one that takes versions, for as long as it lives (flock(2))
    VERSION-DIGEST.safetensors   a version that was proven; others link to the same bytes

Nothing rests on the lock: two that lead write two files, and a version is found by its digest or not at all.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from hetrl.errors import HetrlError


class NodeShare:
    """What one replica sees of the directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: int | None = None

    def leads(self) -> bool:
        """Whether this replica takes versions for its node; it does from then on when nobody does.

        Raises HetrlError where the directory cannot be written.
        """
        if self._lock is None:
            try:
                lock = os.open(self.directory / "lead.lock", os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise HetrlError(f"weights: {self.directory}/lead.lock: {error.strerror}") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def find(self, version: int, digest: str) -> Path | None:
        """Return the file of a version that was proven here."""
        path = self._place(version, digest)
        return path if path.exists() else None

    def newest(self) -> int:
        """Return the newest version of which there is a file, 0 where there is none."""
        return max((int(path.name.partition("-")[0]) for path in self.directory.glob("*.safetensors")), default=0)

    def offer(self, path: Path, version: int, digest: str) -> None:
        """Let the others have a proven file, in the place of the one before."""
        place = self._place(version, digest)
        with suppress(OSError):  # it is there, or this file system has no links: then the others go on alone
            os.link(path, place)
        for other in self.directory.glob("*.safetensors"):
            if other != place:
                other.unlink(missing_ok=True)

    def _place(self, version: int, digest: str) -> Path:
        return self.directory / f"{version}-{digest}.safetensors"

    def close(self) -> None:
        """Lead no more; who leads next starts from its own files."""
        if self._lock is not None:
            for path in self.directory.glob("*.safetensors"):
                path.unlink(missing_ok=True)
            (self.directory / "lead.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
