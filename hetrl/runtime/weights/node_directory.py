"""Where replicas keep their weights: on their own node, where that has room for the versions, once for all of them."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetrl.runtime.weights.node_share import NodeShare

MEMORY = Path("/dev/shm")
VERSIONS = 3  # what is served, the next one until it is proven, and one that a slow replica of the node still reads
log = logging.getLogger(__name__)


@contextmanager
def node_directory(name: str, version_bytes: int, replica: int, scratch: Path) -> Iterator[tuple[Path, NodeShare]]:
    """Make a directory of mode 0700 for the weights of a replica, inside that which its node shares under `name`.

    It is in the system's temporary directory (`TMPDIR`) or else in the node's memory, the first with room for some
    versions, or else in `scratch`. What an earlier life of the same replica left behind is removed, and at the end what
    this one has.
    """
    places = [place for place in (Path(tempfile.gettempdir()), MEMORY) if place.is_dir()]
    here = (place for place in places if (place / name).exists())  # where other replicas of the node are
    roomy = (place for place in places if shutil.disk_usage(place).free >= VERSIONS * version_bytes)
    shared = _private(next(here, next(roomy, scratch)), name)
    for place in places:
        shutil.rmtree(place / name / str(replica), ignore_errors=True)
    directory, share = shared / str(replica), NodeShare(shared)
    directory.mkdir(mode=0o700, exist_ok=True)
    log.info(
        "weights are kept in %s, up to %.1f GB for all replicas of this node", shared, VERSIONS * version_bytes / 1e9
    )
    try:
        yield directory, share
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        share.close()


def _private(place: Path, name: str) -> Path:
    """Return the directory of this name, or, where somebody else has it, another one that is ours alone."""
    directory = place / name
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix=f"{name}.", dir=place))
    return directory
