"""A directory in which the replicas of one node share what arrives: one of them takes a version, all of them have it.

    lead.lock              held by the one that takes versions, for as long as it lives (flock(2))
    DIGEST.safetensors     a version that was proven, under its digest; others link to the same bytes

Nothing rests on the lock: two that lead write two files, and a version is found by its digest or not at all.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class NodeShare:
    """What one replica sees of the directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock: int | None = None

    def leads(self) -> bool:
        """Whether this replica takes versions for its node; it does from then on when nobody does."""
        if self._lock is None:
            lock = os.open(self.directory / "lead.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                return False
            self._lock = lock
        return True

    def find(self, digest: str) -> Path | None:
        """Return the file of a version that was proven here."""
        path = self.directory / f"{digest}.safetensors"
        return path if path.exists() else None

    def offer(self, path: Path, digest: str) -> None:
        """Let the others have a proven file, in the place of the one before."""
        place = self.directory / f"{digest}.safetensors"
        with suppress(OSError):  # it is there, or this file system has no links: then the others go on alone
            os.link(path, place)
        for other in self.directory.glob("*.safetensors"):
            if other != place:
                other.unlink(missing_ok=True)

    def close(self) -> None:
        """Lead no more; who leads next starts from its own files."""
        if self._lock is not None:
            for path in self.directory.glob("*.safetensors"):
                path.unlink(missing_ok=True)
            (self.directory / "lead.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
