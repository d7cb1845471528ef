"""Where labs are on this machine, who keeps each up, and what is left of those whose keeper is gone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.pods import kill_process
from lab.processes import LabError, start_of

# Outside git, and outside /tmp and /run, which are the pods' own. Readable for the job user.
BASE = Path("/var/tmp/hetrl-lab")
BUILD = BASE / "build"
LABS = BASE / "labs"
FILE = "lab.json"


def make_directory(directory: Path) -> Path:
    """Make the run directory of a lab and return it; LABS itself stands for one with a name of its own."""
    LABS.mkdir(parents=True, exist_ok=True)
    if directory == LABS:
        return Path(tempfile.mkdtemp(prefix="lab-", dir=LABS))
    try:
        directory.mkdir()
    except FileExistsError:
        raise LabError(f"{directory}: this lab is up; `make lab-down` ends it") from None
    return directory


def write(directory: Path, warden: int, shape: dict[str, Any]) -> None:
    """Note the shape of a lab, its warden, and this process as its keeper."""
    owners = {"keeper": [os.getpid(), start_of(os.getpid())], "warden": [warden, start_of(warden)]}
    unfinished = directory / f"{FILE}.tmp"
    unfinished.write_text(json.dumps({**shape, **owners}))
    unfinished.replace(directory / FILE)


def read(directory: Path) -> dict[str, Any]:
    """Return what `write` noted; raises LabError where there is no lab."""
    try:
        return dict(json.loads((directory / FILE).read_text()))
    except FileNotFoundError:
        raise LabError(f"{directory}: no lab; start one with `make lab-up`") from None


def keeper_of(directory: Path) -> int | None:
    """Return the process that keeps a lab up, None where it is gone or there is no lab."""
    try:
        pid, start = read(directory)["keeper"]
    except LabError:
        return None
    return int(pid) if start_of(pid) == start else None


def remove_stale() -> None:
    """Remove what labs left whose keeper is gone; usually nothing, for a lab ends with its keeper by itself."""
    for directory in (file.parent for file in LABS.glob(f"*/{FILE}")):
        if keeper_of(directory) is not None:
            continue
        with suppress(LabError):  # on its way down
            kill_process(*read(directory)["warden"])
        shutil.rmtree(directory, ignore_errors=True)
