"""Where replicas keep their weights: on their own node, where that has room for the versions, once for all of them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetrl.runtime.temporary import MEMORY, PREFIX, Held, hold, node_place
from hetrl.runtime.weights.digests import digest_of
from hetrl.runtime.weights.node_share import NodeShare

VERSIONS = 3  # what is served, the next one until it is proven, and one that a slow replica of the node still reads
log = logging.getLogger(__name__)


def name_for(run: Path) -> str:
    """Return the name under which the replicas of a run find each other on a node; no other run has it.

    Sites whose machines share a temporary directory may each have a run directory of the same path: its inode differs.
    """
    return f"{PREFIX}{digest_of(f'{run} {run.stat().st_ino}'.encode())}"


@contextmanager
def node_directory(name: str, version_bytes: int, replica: int, scratch: Path) -> Iterator[tuple[Path, NodeShare]]:
    """Make a directory of mode 0700 for the weights of a replica, inside that which its node shares under `name`.

    It is in the node's temporary directory (`TMPDIR`) or else in the node's memory, the first with room for some
    versions, or else in `scratch`. What an earlier life of the same replica left behind is removed, and at the end what
    this one has. The shared directory stays while a replica lives that holds it.
    """
    places = [place for place in (node_place(), MEMORY) if place.is_dir()]
    here = (place for place in places if (place / name).exists())  # where other replicas of the node are
    roomy = (place for place in places if shutil.disk_usage(place).free >= VERSIONS * version_bytes)
    place = next(here, next(roomy, scratch))
    for other in places:
        shutil.rmtree(other / name / str(replica), ignore_errors=True)
    held, directory = _inside(place, name, str(replica))
    shared, share = held.path, NodeShare(held.path)
    log.info(
        "weights are kept in %s, up to %.1f GB for all replicas of this node", shared, VERSIONS * version_bytes / 1e9
    )
    try:
        yield directory, share
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        share.close()
        held.release()


def _inside(place: Path, name: str, replica: str) -> tuple[Held, Path]:
    """Make the directory of a replica, and the shared one around it as often as a replica that ends removes it."""
    while True:
        with suppress(FileNotFoundError):
            held = hold(_private(place, name))
            directory = held.path / replica
            directory.mkdir(mode=0o700, exist_ok=True)
            return held, directory


def _private(place: Path, name: str) -> Path:
    """Return the directory of this name, or, where somebody else has it, another one that is ours alone."""
    directory = place / name
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix=f"{name}.", dir=place))
    return directory
