"""The files of a run on their way: what a site is sent, and the copies here of what its jobs write."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import hetrl
from hetrl.files import replace_text
from launch.run_directory import Run
from launch.slurm.commands import MANIFEST, WRITTEN_THERE
from launch.slurm.poll import REPLACED, Chunk
from launch.slurm.run import SlurmSite

COPY_SECONDS = 600.0
CODE = "code"


def pack(directory: Path) -> None:
    """Put the code of hetrl into a site's directory here, and the digests of all that is sent (sha256sum --check).

    The code is that of the first time: all sites of a run have the same, whatever is installed when it is resumed.
    """
    copy_code(directory / CODE, hetrl)
    unsent = {path for pattern in WRITTEN_THERE for path in directory.glob(pattern)} | {directory / MANIFEST}
    sent = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not unsent.intersection((path, *path.parents))
    ]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(directory)}\n" for path in sent]
    replace_text(directory / MANIFEST, "".join(lines))


def copy_code(target: Path, *packages: ModuleType) -> None:
    """Copy these packages, this version of them, to a directory that is not there yet."""
    if target.exists():
        return
    partial = target.with_name(f".{target.name}")  # until it is whole: a launcher may be killed meanwhile
    for package in packages:
        source = Path(str(package.__file__)).parent
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(source, partial / source.name, ignore=ignored, dirs_exist_ok=True)
    partial.rename(target)


def send(directory: Path, site: SlurmSite) -> None:
    """Copy a site's directory to the cluster, in one go; what the jobs write there is left alone."""
    exclude = [f"/{pattern}" for pattern in WRITTEN_THERE]
    site.shell.copy_to(directory, site.directory, timeout_seconds=COPY_SECONDS, exclude=exclude)


@dataclass(frozen=True)
class Mirror:
    """The copies here of the files that a site's jobs write.

    Several processes may copy the same file at the same time: each byte goes to its own place.
    """

    run: Run
    site: str

    def offsets(self) -> dict[str, int]:
        """Return how much of each file is here."""
        own, logs = self.run.site(self.site), self.run.path / "logs" / self.site
        found = {path.name: path for path in own.glob("*.jsonl")}
        found |= {f"logs/{path.name}": path for path in logs.glob("*.log")}
        return {name: path.stat().st_size for name, path in found.items()}

    def write(self, chunks: Iterable[Chunk]) -> None:
        """Add what came to the copies."""
        for chunk in chunks:
            path = self._path(chunk.name)
            if chunk.name in REPLACED:
                _replace(path, chunk.data)
            else:
                _write_at(path, chunk.offset, chunk.data)

    def _path(self, name: str) -> Path:
        log = name.removeprefix("logs/")
        return self.run.site(self.site) / name if log == name else self.run.path / "logs" / self.site / log


def _replace(path: Path, data: bytes) -> None:
    if not path.exists() or path.read_bytes() != data:
        replace_text(path, data.decode(errors="replace"))


def _write_at(path: Path, offset: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if offset == 0 and not data.startswith(os.pread(descriptor, len(data), 0)):
            os.ftruncate(descriptor, 0)  # the file was begun again at the site
        os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)
