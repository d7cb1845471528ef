"""One look at a site: what Slurm says of the run's jobs, and what was added to its files. Pure functions.

The files are read on by byte offset, so that nothing is sent twice.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launch.remote import Part, parse, script
from launch.shell import final_line
from launch.slurm.commands import Queued, about_jobs, parse_rows, queued
from launch.slurm.run import SlurmSite

CHUNK_BYTES = 262_144  # of one file in one look; a longer one is caught up with
LOOK_BYTES = 4_000_000  # of all files in one look: more of them might not come within its time, and then none would
REPLACED = ("summary.json", "gateway.endpoint")  # small, and sent as a whole
GROWING = ("events.jsonl", "metrics.jsonl", "samples.jsonl")
_FILE = re.compile(r"file (.+) (\d+) (\d+)")


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file at the site from `offset` on; `size` is that of the whole file."""

    name: str
    size: int
    offset: int
    data: bytes

    @property
    def reaches_end(self) -> bool:
        """Return whether nothing more of the file was there."""
        return self.offset + len(self.data) >= self.size


@dataclass(frozen=True)
class Look:
    """What one look found; `jobs` by key, None where Slurm did not answer, and then `problem` says why.

    There are `more` files, which it did not come to.
    """

    jobs: Mapping[str, Queued] | None
    chunks: tuple[Chunk, ...]
    problem: str = ""
    more: bool = False

    @property
    def complete(self) -> bool:
        """Return whether nothing more of the files was there."""
        return not self.more and all(chunk.reaches_end for chunk in self.chunks)


def poll_script(site: SlurmSite, offsets: Mapping[str, int], logs: bool = True) -> str:
    """Return the script that looks at a site; `offsets` is how much of each file is known."""
    return script(
        *("jobs", "poll"),
        **about_jobs(site),
        chunk_bytes=CHUNK_BYTES,
        look_bytes=LOOK_BYTES,
        files=(*GROWING, *REPLACED),
        whole=REPLACED,
        logs="yes" if logs else "",
        known=offsets,
    )


def parse_poll(text: str) -> Look:
    """Read what `poll_script` printed."""
    parts = parse(text)
    chunks = tuple(
        Chunk(head[1], int(head[2]), int(head[3]), data)
        for name, part in parts.items()
        if (head := _FILE.fullmatch(name)) and part.code == 0 and (data := _decoded(part.text.strip())) is not None
    )
    listed = parts.get("listed", Part())
    if listed.code != 0:
        return Look(None, chunks, final_line(listed.text) or "squeue did not answer")
    return Look(queued(parse_rows(listed.text)), chunks, more="more" in parts)


def _decoded(text: str) -> bytes | None:
    """Return the bytes, None where these are none."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None
