"""Checkpoints of a training engine on disk: a directory that is whole or is not taken for one.

    <root>/step-00000120.partial/   while it is written
        model.safetensors           float32 weights (of bfloat16 models the optimiser's main ones)
        exp_avg.safetensors         Adam's first moments, exp_avg_sq.safetensors its second ones
        random.safetensors          state of the random generators of each rank
        config.json state.json      the model; format, optimiser steps, layout, what the caller keeps
        COMPLETE                    the bytes of each file, written last
    <root>/step-00000120/           the same, renamed once everything is on the disk

Why a format of its own and not megatron's dist_checkpointing: each tensor stands there whole under its Hugging Face
name, so no file knows of a layout, any layout resumes any other, and model.safetensors is a model that other programs
load. It streams one tensor at a time through code that loads and exports weights anyway. In exchange one rank writes
everything, 12 bytes per parameter.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hetrl.errors import HetrlError

FORMAT = "hetrl-checkpoint/1"
COMPLETE, STATE, CONFIG, RANDOM = "COMPLETE", "state.json", "config.json", "random.safetensors"
WEIGHTS = "weights"
TENSOR_FILES = {WEIGHTS: "model.safetensors", "exp_avg": "exp_avg.safetensors", "exp_avg_sq": "exp_avg_sq.safetensors"}
_PARTIAL = ".partial"
_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}

log = logging.getLogger(__name__)


def path_of(root: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps of the run."""
    return root / f"step-{step:08d}"


def latest(root: Path) -> Path | None:
    """Return the whole checkpoint of the highest step under `root`, None without one; others are passed over."""
    for directory in _by_step(root):
        cause = _cause(directory)
        if cause is None:
            return directory
        log.warning("%s", cause)
    return None


def keep_last(root: Path, count: int) -> list[Path]:
    """Remove all but the `count` newest whole checkpoints under `root`, and what was left half-written; return them.

    Not while one is being written. Raises HetrlError for a count below one.
    """
    if count < 1:
        raise HetrlError(f"{root}: {count} checkpoints cannot be kept; keep at least 1")
    directories = _by_step(root)
    unfinished = [directory for directory in directories if not (directory / COMPLETE).is_file()]
    whole = [directory for directory in directories if _cause(directory) is None]
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
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


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


def begin(directory: Path) -> Path:
    """Make the empty directory in which the files of a checkpoint are written; `finish` gives it its name."""
    partial = directory.with_name(directory.name + _PARTIAL)
    if partial.exists():
        _remove(partial)
    partial.mkdir(parents=True)
    return partial


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write CPU tensors of one dtype to a safetensors file as they come, in the order of `shapes`, and sync it.

    Layout: https://github.com/huggingface/safetensors ("Format"). Raises OSError when the disk does.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers loads no file without it
    start = 0
    for name, shape in shapes.items():
        end = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), (arrived, tensor) in zip(shapes.items(), tensors, strict=True):
            assert (arrived, tuple(tensor.shape), tensor.dtype) == (name, shape, dtype), f"{arrived} came for {name}"
            file.write(tensor.contiguous().view(-1).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a small JSON file and sync it."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def finish(directory: Path) -> None:
    """Mark what `begin` started as complete and give it its name; a checkpoint of that name is replaced."""
    partial = directory.with_name(directory.name + _PARTIAL)
    write_json(partial / COMPLETE, {path.name: path.stat().st_size for path in sorted(partial.iterdir())})
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
