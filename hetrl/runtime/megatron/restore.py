"""Taking up a model or a checkpoint: every rank reads its own parts of the files, whatever layout wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from hetrl.errors import HetrlError
from hetrl.runtime.checkpoints import files
from hetrl.runtime.megatron import hf_weights
from hetrl.runtime.megatron.agreement import agree
from hetrl.runtime.megatron.checkpoint import RANDOM, generators, layout_of, rank_file
from hetrl.runtime.megatron.hf_weights import SCALAR_HEAD
from hetrl.runtime.megatron.optimizer import MOMENTS, WEIGHTS, Slice, set_steps, slice_of
from hetrl.runtime.megatron.shards import Shards, Source, check_shape
from hetrl.runtime.megatron.slices import Box
from hetrl.runtime.megatron.tensor_files import ModelFiles, Pieces, TensorFiles, read_index


class _WithHead:
    """The tensors of a model and, where it has none, a scalar head."""

    def __init__(self, model: ModelFiles, head: torch.Tensor) -> None:
        self._model, self._head = model, head
        self.names = model.names | {SCALAR_HEAD}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._model.shape(name) if name in self._model.names else tuple(self._head.shape)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the part of a tensor in a box."""
        return self._model.read(name, box) if name in self._model.names else self._head


def load_files(shards: Shards, source: Path, head: torch.Tensor | None = None) -> None:
    """Take the weights of a Hugging Face directory or file, of each tensor this rank's part (collective).

    `head` is the scalar head [1, hidden] of a model whose files have none, a language model's. Raises HetrlError on
    every rank when the files lack a tensor, have others or other shapes, naming them, or when a rank cannot read them;
    the weights are then undefined.
    """
    failure = None
    try:
        with TensorFiles() as opened:
            stored = ModelFiles(source, opened)
            model = stored if head is None else _WithHead(stored, head)
            _check_names(shards, model.names)
            for name, parameter in shards.parameters.items():
                shards.fill(parameter.data, name, model)
    except (HetrlError, OSError) as error:
        failure = error
    agree(failure, f"{source}: the weights could not be loaded")


def _check_names(shards: Shards, names: set[str]) -> None:
    wanted = {name for name in names if not hf_weights.passed_over(name, shards.homes)}
    hf_weights.missing_and_surplus(wanted, shards.homes)


def restore(shards: Shards, optimizer: Any, directory: Path) -> dict[str, Any]:
    """Take the state of a checkpoint, whatever layout wrote it, and return its state.json (collective).

    Without an optimiser (None) only the weights are taken. Raises HetrlError on every rank, naming the file or the
    tensor, when one rank cannot read it or the checkpoint is of another model; the weights are then undefined.
    """
    failure, state = None, {}
    try:
        state = files.read_state(directory)
        with TensorFiles() as opened:
            _take(shards, optimizer, directory, opened)
            if state["layout"] == layout_of(shards):
                _take_generators(opened.read(directory / rank_file(dist.get_rank()), RANDOM))
        if optimizer is not None:
            set_steps(optimizer, int(state["steps"]))
    except (HetrlError, OSError) as error:
        failure = error
    agree(failure, f"{directory}: the checkpoint could not be loaded")
    return state


def _take(shards: Shards, optimizer: Any, directory: Path, opened: TensorFiles) -> None:
    """Take the weights, and what this rank's optimiser holds."""
    index = read_index(directory)
    pieces = {kind: Pieces(directory, index, kind, opened) for kind in index}
    weights = pieces[WEIGHTS] if WEIGHTS in pieces else ModelFiles(directory, opened)
    for source in (weights, *pieces.values()):
        _check_names(shards, source.names)
    for name, parameter in shards.parameters.items():
        values = torch.zeros(parameter.shape, dtype=torch.float32, device=shards.device)
        shards.fill(values, name, weights)
        parameter.data.copy_(values)
        held = slice_of(optimizer, parameter) if optimizer is not None else None
        if held is None:
            continue
        held.values[WEIGHTS].copy_(values.view(-1)[held.range])
        for kind in MOMENTS:
            _take_slice(shards, name, held, kind, pieces[kind])


def _take_slice(shards: Shards, parameter: str, held: Slice, kind: str, source: Source) -> None:
    """Take one kind of values of what this rank's optimiser holds of a parameter."""
    held.values[kind].zero_()  # rows that pad a vocabulary are in no file
    for name, home in shards.homes_of(parameter):
        check_shape(name, home, source.shape(name))
        runs, boxes = shards.part(home, parameter, held.range.start, held.range.stop)
        if boxes:
            flat = torch.cat([source.read(name, box).view(-1) for box in boxes])
            for (start, stop), values in zip(runs, flat.split([stop - start for start, stop in runs]), strict=True):
                held.values[kind][start - held.start : stop - held.start].copy_(values)


def _take_generators(packed: torch.Tensor) -> None:
    """Put this rank's random generators where the checkpoint says."""
    sizes = {name: state.numel() for name, state in generators().items()}
    if packed.numel() != sum(sizes.values()):
        return  # written on another kind of device: generators start from their seeds
    parts = packed.split(list(sizes.values()))
    states = {name: part.clone() for name, part in zip(sizes, parts, strict=True)}
    torch.set_rng_state(states.pop("torch"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    get_cuda_rng_tracker().set_states(states)
