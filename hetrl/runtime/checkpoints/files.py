"""Checkpoints of a training engine on disk: a directory that is whole or is not taken for one.

    <root>/step-00000120.partial/               while it is written
        model-00001-of-00004.safetensors ...    whole tensors in the model's dtype, each rank some of them
        model.safetensors.index.json            which file has which: a model that other programs load
        config.json tokenizer.json ...          the model, its tokenizer and chat template
        optimizer-rank-00000.safetensors ...    a rank's slices of Adam's moments exp_avg and exp_avg_sq and, of
                                                bfloat16 models, float32 weights; its random generators' state
        optimizer.index.json                    which file has which slice of which Hugging Face tensor
        state.json                              format, optimiser steps, layout, what the caller keeps
        samples.msgpack.zst                     samples that are under way, where there are some
        digests.json                            the BLAKE3 digest of each file
        COMPLETE                                the bytes of each file, written last
    <root>/step-00000120/                       the same, renamed once everything is on the disk

Slices are boxes of the tensors under their Hugging Face names, so no file knows of a layout, and any layout resumes any
other: it reads the boxes that overlap its own.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hetrl.errors import HetrlError
from hetrl.workload import ACTOR_TRAINING

FORMAT = "hetrl-checkpoint/2"
CHECKPOINTS = Path("checkpoints")
COMPLETE, STATE, CONFIG, DIGESTS = "COMPLETE", "state.json", "config.json", "digests.json"
SAMPLES = "samples.msgpack.zst"
MODEL_INDEX, PIECES_INDEX = "model.safetensors.index.json", "optimizer.index.json"
# What a model needs besides its weights and configuration, under the names of Hugging Face, as far as it has them.
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
PARTIAL = ".partial"
TAKES_UP = "takes-up.json"  # in the leading site's directory: step and site of the checkpoint that a run goes on from
METRICS_BEFORE = "metrics-before.jsonl"  # in a site's directory: those of the runs that this one goes on from

log = logging.getLogger(__name__)


def root_of(task: str) -> Path:
    """Return where the checkpoints of a task lie in a site's directory."""
    return CHECKPOINTS if task == ACTOR_TRAINING else CHECKPOINTS / task


def path_of(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps of the run."""
    return root / f"step-{step:08d}"


def whole(root: Path) -> dict[int, Path]:
    """Return the whole checkpoints under `root` by their step, the highest first; others are passed over."""
    found = {}
    for directory in _by_step(root):
        cause = _cause(directory)
        if cause is None:
            found[step_of(directory)] = directory
        else:
            log.warning("%s", cause)
    return found


def newest_step(found: Mapping[str, Collection[int]]) -> int | None:
    """Return the last step of which there is a checkpoint of every model that is trained; None where there is none.

    `found` has the steps of each. At step 0 a critic has the weights that it starts from, and needs no checkpoint.
    """
    steps = set(found[ACTOR_TRAINING])
    for task, others in found.items():
        steps &= {*others, *([] if task == ACTOR_TRAINING else [0])}
    return max(steps, default=None)


def keep_last(root: Path, count: int, most_gb: float | None = None, spared: Collection[int] = ()) -> list[Path]:
    """Remove all but the `count` newest whole checkpoints under `root`, and what was left half-written; return them.

    Of these, the older ones go where all would take more than `most_gb` (1e9 bytes). That of step 0 stays, which has
    the weights that the run began with, and those of the steps `spared`. Not while one is being written. Raises
    HetrlError for a count below one.
    """
    if count < 1:
        raise HetrlError(f"{root}: {count} checkpoints cannot be kept; keep at least 1")
    directories = _by_step(root)
    unfinished = [directory for directory in directories if not (directory / COMPLETE).is_file()]
    whole = [directory for directory in directories if step_of(directory) and _cause(directory) is None]
    while count > 1 and most_gb is not None and sum(map(bytes_of, whole[:count])) > most_gb * 1e9:
        count -= 1
    kept = {*whole[:count], *(directory for directory in whole if step_of(directory) in spared)}
    surplus = [directory for directory in whole if directory not in kept]
    removed = [*surplus, *unfinished, *sorted(root.glob(f"step-*{PARTIAL}"))]
    for directory in removed:
        remove(directory)
    return removed


def bytes_of(directory: Path) -> int:
    """Return what the files of a checkpoint take."""
    return sum(path.stat().st_size for path in directory.iterdir())


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
    return sorted(found, key=step_of, reverse=True)


def step_of(directory: Path) -> int:
    """Return the step of a directory that has the name of a checkpoint."""
    return int(directory.name.removeprefix("step-"))


def remove(directory: Path) -> None:
    """Delete a checkpoint; one that is deleted halfway is not whole."""
    (directory / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(directory)


def read_state(directory: Path) -> dict[str, Any]:
    """Return state.json of a whole checkpoint; raise HetrlError that names what is not there or not whole."""
    if not directory.is_dir():
        raise HetrlError(f"{directory}: no checkpoint there")
    try:
        sizes: dict[str, int] = dict(json.loads((directory / COMPLETE).read_text(encoding="utf-8")))
        state: dict[str, Any] = dict(json.loads((directory / STATE).read_text(encoding="utf-8")))
        found = {name: (directory / name).stat().st_size for name in sizes}
    except (OSError, ValueError, TypeError) as error:
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
    return directory.with_name(directory.name + PARTIAL)
