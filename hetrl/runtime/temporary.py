"""Temporary directories of a run on a node, of which nothing stays however the processes end.

    with private_directory() as held:       who starts a process: a TMPDIR of its own
        Popen(..., env={"TMPDIR": held.path}, pass_fds=held.lock)
    held = hold(place / name)               who shares one: it stays for as long as somebody holds it
    remove_unheld()                         whoever lives on, or comes next to the node, clears the rest

Who uses a directory holds the kernel's lock (flock(2)) on it, which ends with the last process that has it open, also
where that is killed. A directory that nobody holds is nobody's. systemd-tmpfiles, which clears /tmp of what is old,
leaves alone what is locked so, with all that is in it (systemd-tmpfiles(8)).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PREFIX = "hetrl-tmp-"
MEMORY = Path("/dev/shm")
# unix(7): the path of a socket has 107 bytes. A server's own sockets add 14 for their directory and 37 for a name.
MOST_BYTES = 56
ATTEMPTS = 5  # a process that ends meanwhile may still write


@dataclass(frozen=True)
class Held:
    """A directory of mode 0700 that stays until `release`, or the end of all processes that have `lock` open.

    `lock` is empty where the file system has no locks: then the directory stays until somebody removes it.
    """

    path: Path
    lock: tuple[int, ...]

    def leave(self) -> None:
        """Hold it no longer; whoever inherited `lock` still does."""
        for descriptor in self.lock:
            os.close(descriptor)

    def release(self) -> None:
        """Hold it no longer; where nobody else does, it is removed."""
        self.leave()
        _remove_if_unheld(self.path)


def node_place() -> Path:
    """Return the temporary directory that all processes of the node share, around the private one of this process."""
    here = Path(tempfile.gettempdir())
    return here.parent if here.name.startswith(PREFIX) else here


@contextmanager
def private_directory() -> Iterator[Held]:
    """Make a temporary directory for one process, and remove it with all that is in it.

    It is in the node's temporary directory, or in /tmp where sockets in it would have too long a path.
    """
    held = make_private()
    try:
        yield held
    finally:
        held.leave()
        remove_private(held.path)


def make_private() -> Held:
    """Make a temporary directory for one process."""
    place = node_place()
    short = len(os.fsencode(place)) + len(f"/{PREFIX}12345678") <= MOST_BYTES
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place if short else "/tmp"))
        with suppress(FileNotFoundError):
            return hold(directory)


def remove_private(path: Path) -> None:
    """Remove a temporary directory whose process has ended, also where children of it have not yet."""
    for _ in range(ATTEMPTS):
        shutil.rmtree(path, ignore_errors=True)


def hold(directory: Path) -> Held:
    """Hold a directory that is there; raises FileNotFoundError where somebody who found it unheld removes it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not _is_there(directory, descriptor):
            raise FileNotFoundError(directory)
    except FileNotFoundError:
        os.close(descriptor)
        raise
    except OSError:  # this file system has no locks
        os.close(descriptor)
        return Held(directory, ())
    return Held(directory, (descriptor,))


def remove_unheld() -> None:
    """Remove this user's directories of runs on this node that no process holds."""
    for place in {node_place(), Path("/tmp"), MEMORY}:
        for directory in place.glob(f"{PREFIX}*"):
            _remove_if_unheld(directory)


def _remove_if_unheld(directory: Path) -> None:
    """Remove a directory of this user that nobody holds, at most; what others do meanwhile is no error."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                return
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(directory, descriptor):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether a path still leads to the directory that was opened."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False
