"""The notice that Slurm ends a site's job soon: a file that the job's script leaves in the site's directory."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

ENDING = "ending"  # slurm_templates/gang.sbatch.j2
LOOK_SECONDS = 1.0  # between two looks for it

# By site directory: when it was looked at last, and what was there. Members of one process share the looks: an emulated
# site has a thousand of them.
_looks: dict[Path, tuple[float, bool]] = {}


async def ends_soon(directory: Path) -> bool:
    """Return whether the script of a site's job has left `ENDING` in the site's directory, as far as is known."""
    looked, found = _looks.get(directory, (-math.inf, False))
    now = time.monotonic()
    if not found and now - looked >= LOOK_SECONDS:
        _looks[directory] = now, False  # the others go by the last look meanwhile
        found = await asyncio.to_thread((directory / ENDING).exists)
        _looks[directory] = now, found
    return found
