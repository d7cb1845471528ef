"""Checkpoints of a training engine on disk: a directory that is whole or is not taken for one.

    <root>/step-00000120.partial/               while it is written
        model-00001-of-00004.safetensors ...    whole tensors in the model's dtype, each rank some of them
        model.safetensors.index.json            which file has which: a model that other programs load
        optimizer-rank-00000.safetensors ...    a rank's slices of Adam's moments exp_avg and exp_avg_sq and, of
                                                bfloat16 models, float32 weights; its random generators' state
        optimizer.index.json                    which file has which slice of which Hugging Face tensor
        config.json state.json                  the model; format, optimiser steps, layout, what the caller keeps
        COMPLETE                                the bytes of each file, written last
    <root>/step-00000120/                       the same, renamed once everything is on the disk

Slices are boxes of the tensors under their Hugging Face names, so no file knows of a layout, and any layout resumes any
other: it reads the boxes that overlap its own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.tensor_files import MODEL_INDEX, PIECES_INDEX, index_of, model_index_of

FORMAT = "hetrl-checkpoint/2"
COMPLETE, STATE, CONFIG = "COMPLETE", "state.json", "config.json"
WEIGHTS, RANDOM = "weights", "random"  # of a rank's file, beside the moments
_PARTIAL = ".partial"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """What the ranks write together: files by rank, the shapes of all tensors, the kinds of values in slices.

    Not every rank has whole tensors to write.
    """

    models: Mapping[int, str]
    ranks: Mapping[int, str]
    shapes: Mapping[str, tuple[int, ...]]
    kinds: tuple[str, ...]

    def files_of(self, rank: int) -> list[str]:
        """Return the files that a rank writes."""
        return [files[rank] for files in (self.models, self.ranks) if rank in files]


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's slices."""
    return f"optimizer-rank-{rank:05d}.safetensors"


def path_of(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps of the run."""
    return root / f"step-{step:08d}"


def whole(root: Path) -> dict[int, Path]:
    """Return the whole checkpoints under `root` by their step, the highest first; others are passed over."""
    found = {}
    for directory in _by_step(root):
        cause = _cause(directory)
        if cause is None:
            found[_step_of(directory)] = directory
        else:
            log.warning("%s", cause)
    return found


def keep_last(root: Path, count: int) -> list[Path]:
    """Remove all but the `count` newest whole checkpoints under `root`, and what was left half-written; return them.

    That of step 0 stays, which has the weights that the run began with. Not while one is being written. Raises
    HetrlError for a count below one.
    """
    if count < 1:
        raise HetrlError(f"{root}: {count} checkpoints cannot be kept; keep at least 1")
    directories = _by_step(root)
    unfinished = [directory for directory in directories if not (directory / COMPLETE).is_file()]
    whole = [directory for directory in directories if _step_of(directory) and _cause(directory) is None]
    removed = [*whole[count:], *unfinished, *sorted(root.glob(f"step-*{_PARTIAL}"))]
    for directory in removed:
        _remove(directory)
    return removed


def _cause(directory: Path) -> HetrlError | None:
    """Return why a checkpoint cannot be loaded; None when it can."""
    try:
        read_state(directory)
    except HetrlError as error:
        return error
    return None


def _by_step(root: Path) -> list[Path]:
    """Return the directories named as checkpoints, the newest first."""
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=_step_of, reverse=True)


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def _remove(directory: Path) -> None:
    """Delete a checkpoint; one that is deleted halfway is not whole."""
    (directory / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(directory)


def read_state(directory: Path) -> dict[str, Any]:
    """Return state.json of a whole checkpoint; raise HetrlError that names what is not there or not whole."""
    if not directory.is_dir():
        raise HetrlError(f"{directory}: no checkpoint there")
    try:
        sizes = json.loads((directory / COMPLETE).read_text(encoding="utf-8"))
        state: dict[str, Any] = json.loads((directory / STATE).read_text(encoding="utf-8"))
        found = {name: (directory / name).stat().st_size for name in sizes}
    except (OSError, ValueError) as error:
        raise HetrlError(f"{directory}: half-written, it cannot be loaded ({error}); take an older one") from error
    for name, size in sizes.items():
        if found[name] != size:
            raise HetrlError(
                f"{directory}: half-written, it cannot be loaded: {name} has {found[name]} of {size} bytes; "
                "take an older one"
            )
    if state.get("format") != FORMAT:
        raise HetrlError(f"{directory}: its format is {state.get('format')}, this hetrl reads {FORMAT}")
    return state


def partial_of(directory: Path) -> Path:
    """Return where the files of a checkpoint are written."""
    return directory.with_name(directory.name + _PARTIAL)


def begin(directory: Path) -> Path:
    """Make the empty directory in which the files of a checkpoint are written; `finish` gives it its name."""
    partial = partial_of(directory)
    if partial.exists():
        _remove(partial)
    partial.mkdir(parents=True)
    return partial


def discard(directory: Path) -> None:
    """Remove what `begin` started, as far as that can be done: a full disk wants the room."""
    shutil.rmtree(partial_of(directory), ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small JSON file and sync it."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def finish(directory: Path, contents: Contents) -> None:
    """Mark what `begin` started as complete and give it its name; a checkpoint of that name is replaced.

    Raises HetrlError when a file is missing or holds too little, OSError when the disk fails.
    """
    partial = partial_of(directory)
    models, ranks = ([partial / name for name in files.values()] for files in (contents.models, contents.ranks))
    write_json(partial / MODEL_INDEX, model_index_of(models))
    write_json(partial / PIECES_INDEX, index_of(ranks, contents.shapes, contents.kinds))
    write_json(partial / COMPLETE, {path.name: path.stat().st_size for path in sorted(partial.iterdir())})
    give_name(directory)


def give_name(directory: Path) -> None:
    """Let what `begin` started, and what is complete, be the checkpoint; one of that name is replaced."""
    partial = partial_of(directory)
    _sync_directory(partial)
    replaced = directory.with_name(f"{directory.name}.replaced{_PARTIAL}")
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    _sync_directory(directory.parent)
    if replaced.exists():
        _remove(replaced)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
