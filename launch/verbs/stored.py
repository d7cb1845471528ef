"""The checkpoints that runs have at their sites: where each lies, whether it is whole, which one a resume takes up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hetrl.errors import HetrlError
from hetrl.runtime.checkpoints.files import COMPLETE, DIGESTS, PARTIAL, PIECES_INDEX, SAMPLES, STATE, newest_step
from hetrl.runtime.checkpoints.places import EarlierRun
from hetrl.workload import ACTOR_TRAINING
from launch.remote import parse, script
from launch.shell import BASH, Shell

ASK_SECONDS = 60.0
SLOWEST_BYTES_PER_S = 1e6  # of a copy to here
NOT_OF_THE_MODEL = ("optimizer-rank-*", PIECES_INDEX, STATE, SAMPLES, DIGESTS, COMPLETE)


@dataclass(frozen=True)
class Place:
    """A site, and its directories (absolute, there) of a run and of those that it went on from, the latest first."""

    name: str
    shell: Shell
    runs: tuple[EarlierRun, ...]


@dataclass(frozen=True)
class Stored:
    """A checkpoint of a task at a site, or what is left of one; `directory` is absolute there, `written` its last file.

    `files` are their bytes by name. It is `whole` where they are those that it says it has.
    """

    site: str
    task: str
    step: int
    directory: str
    files: Mapping[str, int]
    written: float
    whole: bool

    @property
    def bytes(self) -> int:
        """Return what it takes on the disk."""
        return sum(self.files.values())


def stored_at(place: Place) -> list[Stored]:
    """Return the checkpoints of a site, those of later runs first; raises HetrlError where it cannot be asked."""
    listing = script("checkpoints", directories=[str(one.directory) for one in place.runs])
    text = place.shell.check(BASH, stdin=listing, timeout_seconds=ASK_SECONDS, doing="list the checkpoints")
    return parse_stored(text, place)


def parse_stored(text: str, place: Place) -> list[Stored]:
    """Read what checkpoints.sh printed; what an earlier run wrote behind the step where it was left is passed over."""
    parts, found = parse(text), []
    for run in place.runs:
        directory = run.directory
        listed = parts.get(f"files {directory}")
        by_place: dict[PurePosixPath, dict[str, tuple[int, float]]] = {}
        for line in listed.text.splitlines() if listed is not None else ():
            size, seconds, path = line.split(" ", 2)
            file = PurePosixPath(path)
            by_place.setdefault(file.parent, {})[file.name] = int(size), float(seconds)
        for below, files in by_place.items():
            sizes = {name: size for name, (size, _) in files.items()}
            written = max(seconds for _, seconds in files.values())
            said = parts.get(f"complete {directory}/{below}/{COMPLETE}")
            if below.name.startswith("step-"):
                step = int(below.name.removeprefix("step-").split(".")[0])
                task = below.parts[1] if len(below.parts) > 2 else ACTOR_TRAINING
                whole = not below.name.endswith(PARTIAL) and said is not None and _has_all(sizes, said.text)
                if run.has(step):
                    found.append(Stored(place.name, task, step, f"{directory}/{below}", sizes, written, whole))
    return found


def _has_all(sizes: Mapping[str, int], complete: str) -> bool:
    """Whether these files are those that a checkpoint says it has."""
    try:
        wanted = dict(json.loads(complete))
    except (ValueError, TypeError):
        return False
    return all(sizes.get(name) == size for name, size in wanted.items())


def newest_of(stored: Iterable[Stored], trained_at: Mapping[str, str], sites: Sequence[str]) -> dict[str, Stored]:
    """Return, by task, the checkpoint that a run takes up which has members at these sites; empty: none.

    It is that of the last step of which every model has one; a critic needs none at step 0. Of several places that of
    its training counts first, and there that of the latest run.
    """
    whole: dict[str, dict[int, Stored]] = {task: {} for task in trained_at}
    for one in sorted(stored, key=lambda one: trained_at.get(one.task) != one.site):
        if one.whole and one.site in sites and one.task in trained_at:
            whole[one.task].setdefault(one.step, one)
    step = newest_step(whole)
    return {task: by_step[step] for task, by_step in whole.items() if step in by_step} if step is not None else {}


def chosen(stored: Sequence[Stored], step: int | None) -> Sequence[Stored]:
    """Return the places of the actor's whole checkpoint of a step, None: the last; raises HetrlError where none is."""
    whole = [one for one in stored if one.whole and one.task == ACTOR_TRAINING]
    steps = sorted({one.step for one in whole})
    if not steps:
        raise HetrlError("no whole checkpoint is at any site that answers; `hetrl checkpoints` shows what is where")
    if step is not None and step not in steps:
        raise HetrlError(f"no whole checkpoint of step {step} is there; there are {', '.join(map(str, steps))}")
    wanted = steps[-1] if step is None else step
    return [one for one in whole if one.step == wanted]


def fetch_model(one: Stored, shell: Shell, target: Path) -> None:
    """Copy the model of a checkpoint to a directory that is not there yet; it has its name once it is whole.

    Raises HetrlError where it did not come whole.
    """
    partial = target.with_name(f".{target.name}{PARTIAL}")
    seconds = ASK_SECONDS + one.bytes / SLOWEST_BYTES_PER_S
    wanted = {name: size for name, size in one.files.items() if _of_the_model(name)}
    try:
        shell.copy_from(one.directory, partial, timeout_seconds=seconds, exclude=NOT_OF_THE_MODEL)
        if {path.name: path.stat().st_size for path in partial.iterdir()} != wanted:
            raise HetrlError(f"{one.site}: {one.directory} changed while it was copied; export it again")
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _of_the_model(name: str) -> bool:
    return not any(PurePosixPath(name).match(pattern) for pattern in NOT_OF_THE_MODEL)
