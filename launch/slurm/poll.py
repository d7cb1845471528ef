"""One look at a site: what Slurm says of the run's jobs, and what was added to its files. Pure functions.

The files are read on by byte offset, so that nothing is sent twice.
"""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from launch.slurm.commands import Queued, listing, parse_rows, queued
from launch.slurm.run import SlurmSite

CHUNK_BYTES = 262_144  # of one file in one look; a longer one is caught up with
REPLACED = ("summary.json", "gateway.endpoint")  # small, and sent as a whole
GROWING = ("events.jsonl", "metrics.jsonl")
_FILE = re.compile(r"^@ file (\S+) (\d+) (\d+)\n(.*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file at the site from `offset` on; `size` is that of the whole file."""

    name: str
    size: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Look:
    """What one look found; `jobs` by key, None where Slurm did not answer, and then `problem` says why."""

    jobs: Mapping[str, Queued] | None
    chunks: tuple[Chunk, ...]
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Return whether nothing more of the files was there."""
        return all(chunk.offset + len(chunk.data) >= chunk.size for chunk in self.chunks)


def poll_script(site: SlurmSite, offsets: Mapping[str, int], logs: bool = True) -> str:
    """Return the script that looks at a site; `offsets` is how much of each file is known."""
    cases = "".join(f"{shlex.quote(name)}) echo {offset} ;; " for name, offset in offsets.items() if offset)
    files = " ".join((*GROWING, *REPLACED, *(("logs/*.log",) if logs else ())))
    return f"""\
{listing(site)} 2>&1 && echo '@ answered'
cd {shlex.quote(site.directory)} || exit
known() {{ case "$1" in {cases}*) echo 0 ;; esac; }}
for file in {files}; do
  [ -f "$file" ] || continue
  size=$(stat -c %s "$file"); from=$(known "$file")
  if [ "$size" -lt "$from" ]; then from=0; fi
  if [ "$size" -eq "$from" ]; then continue; fi
  echo "@ file $file $size $from"
  tail -c +$((from + 1)) "$file" | head -c {CHUNK_BYTES} | base64 -w 0; echo
done
"""


def parse_poll(text: str) -> Look:
    """Read what `poll_script` printed."""
    chunks = tuple(
        Chunk(name, int(size), int(offset), data)
        for name, size, offset, encoded in _FILE.findall(text)
        if (data := _decoded(encoded)) is not None
    )
    head, answered, _ = _FILE.split(text)[0].partition("@ answered\n")
    if not answered:
        lines = [line.strip() for line in head.splitlines() if line.strip()]
        return Look(None, chunks, lines[-1] if lines else "squeue did not answer")
    return Look(queued(parse_rows(head)), chunks)


def _decoded(text: str) -> bytes | None:
    """Return the bytes, None where the connection was lost amid them."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return None
