"""Saving: every rank copies its share of a training engine's state to host memory and writes it beside the next steps.

    saving = begin(...)      every rank: agree on a directory, copy what is to be written, start to write it
    ...                      steps change the weights; the copy stays
    saving.finish()          every rank: wait until all files are on the disk; then rank 0 names the checkpoint

A rank writes what its optimiser holds, and of the whole weights of its stage as many bytes as the others do. Ranks that
do not see the directory of rank 0, being at another site, send their bytes to one that does, in `begin`: nothing is
sent beside the steps, since collectives have one order on all ranks. The files are those of `checkpoints.files`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from hetrl.errors import HetrlError
from hetrl.runtime.checkpoints import files, writing
from hetrl.runtime.megatron import hf_weights, slices
from hetrl.runtime.megatron.agreement import agree, everywhere, send, write_arriving
from hetrl.runtime.megatron.hf_weights import Home
from hetrl.runtime.megatron.layout import Layout
from hetrl.runtime.megatron.optimizer import MOMENTS, WEIGHTS, Slice, slice_of
from hetrl.runtime.megatron.shards import Shards
from hetrl.runtime.megatron.snapshot import Background, Snapshot, write_parts
from hetrl.runtime.megatron.tensor_files import index_of, model_index_of, name_of

RANDOM = "random"  # of a rank's file, beside the slices
Snapshots = dict[str, Snapshot]  # by the name of the file


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


@dataclass(frozen=True)
class Model:
    """What makes a checkpoint's weights a model: its Hugging Face configuration, and a directory with its tokenizer.

    The files `beside` it are the caller's.
    """

    config: Mapping[str, Any]
    tokenizer: Path | None
    beside: Mapping[str, bytes]

    def write(self, directory: Path) -> None:
        """Write all of it."""
        for name, content in self.beside.items():
            writing.write(directory / name, [content])
        writing.write_json(directory / files.CONFIG, self.config)
        sources = [self.tokenizer / name for name in files.TOKENIZER] if self.tokenizer is not None else []
        for source in sources:
            if source.is_file():
                writing.write(directory / source.name, [memoryview(source.read_bytes())])


def complete(directory: Path, contents: Contents) -> None:
    """Write the indices of what the ranks wrote, then let it be the checkpoint.

    Raises HetrlError when a file is missing or holds too little, OSError when the disk fails.
    """
    partial = files.partial_of(directory)
    models, ranks = ([partial / name for name in by.values()] for by in (contents.models, contents.ranks))
    writing.write_json(partial / files.MODEL_INDEX, model_index_of(models))
    writing.write_json(partial / files.PIECES_INDEX, index_of(ranks, contents.shapes, contents.kinds))
    writing.finish(directory)


@dataclass(frozen=True, eq=False)
class Saving:
    """A checkpoint on its way to the disk; `begin` starts one."""

    directory: Path
    contents: Contents
    background: Background

    def finish(self, *, wait: bool = True) -> bool:
        """Complete the checkpoint once all ranks have written their files; return whether it is whole (collective).

        Without `wait`, return False while a rank still writes. Raises HetrlError on every rank when one could not
        write, naming the file and the cause; then no checkpoint has the name, and what was written of it is removed.
        """
        if not wait and not all(everywhere(self.background.done)):
            return False
        self.background.join()
        try:
            agree(self.background.failure, _failed(self.directory))
            agree(self._name() if dist.get_rank() == 0 else None, _failed(self.directory))
        except HetrlError:
            if dist.get_rank() == 0:
                writing.discard(self.directory)
            everywhere(True)  # no rank goes on before that is done
            raise
        return True

    def _name(self) -> Exception | None:
        """Let the files be the checkpoint; return why that cannot be."""
        try:
            complete(self.directory, self.contents)
        except (HetrlError, OSError) as error:
            return error
        return None


def begin(
    shards: Shards, optimizer: Any, directory: Path, model: Model, steps: int, extra: Mapping[str, Any]
) -> Saving:
    """Copy weights, optimiser and generators to host memory and start to write them (collective).

    Raises HetrlError on every rank when `extra` is not JSON, or when rank 0 cannot make the directory.
    """
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise HetrlError(f"{directory}: what a checkpoint keeps must be JSON: {error}") from error
    state = {"format": files.FORMAT, "steps": steps, "layout": layout_of(shards), "extra": dict(extra)}
    sees = [True, *everywhere(_open(directory, model, state))[1:]]  # rank 0 has made it
    owners = _owners(shards.homes, shards.layout)
    contents = _contents(shards, owners)
    rank = dist.get_rank()
    snapshots = {contents.ranks[rank]: _slices(shards, optimizer)}
    if rank in contents.models:
        snapshots[contents.models[rank]] = Snapshot()
    _add_whole(shards, owners, snapshots.get(contents.models.get(rank, "")))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    partial = files.partial_of(directory)
    failure = _carry(partial, contents, snapshots, sees)

    def write() -> None:
        for name, snapshot in snapshots.items() if sees[rank] else ():
            write_parts(partial / name, snapshot.parts())
        if failure is not None:
            raise failure

    return Saving(directory, contents, Background(write))


def _failed(directory: Path) -> str:
    return f"{directory}: the checkpoint could not be written"


def layout_of(shards: Shards) -> dict[str, Any]:
    """Return what state.json says of the layout."""
    layout = shards.layout
    return {"tensor": layout.tensor, "stages": [list(stage) for stage in layout.stages], "data": layout.data}


def _open(directory: Path, model: Model, state: Mapping[str, Any]) -> bool:
    """Make the directory at rank 0 and return whether this rank sees it: the same name may be another disk's."""
    mark, failure = torch.tensor([secrets.randbits(62)]), None
    if dist.get_rank() == 0:
        try:
            partial = writing.begin(directory)
            model.write(partial)
            writing.write_json(partial / files.STATE, {**state, "id": mark.item()})
        except OSError as error:
            failure = error
            writing.discard(directory)
    agree(failure, _failed(directory))
    dist.broadcast(mark, 0)
    try:
        found = json.loads((files.partial_of(directory) / files.STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found["id"] == mark.item())


def _contents(shards: Shards, owners: Mapping[str, int]) -> Contents:
    """Return which files the ranks write, and what they are to hold together."""
    writers, world = sorted(set(owners.values())), shards.layout.world_size
    return Contents(
        models={rank: f"model-{i:05d}-of-{len(writers):05d}.safetensors" for i, rank in enumerate(writers, 1)},
        ranks={rank: rank_file(rank) for rank in range(world)},
        shapes={name: home.shape for name, home in shards.homes.items()},
        kinds=_kinds(shards),
    )


def _kinds(shards: Shards) -> tuple[str, ...]:
    """Return what is written in slices: of a float32 model the whole weights are the optimiser's already."""
    same = all(parameter.dtype is torch.float32 for parameter in shards.parameters.values())
    return MOMENTS if same else (WEIGHTS, *MOMENTS)


def _owners(homes: Mapping[str, Home], layout: Layout) -> dict[str, int]:
    """Return which rank writes each whole tensor: one of its stage, those with the fewest bytes so far first."""
    sizes = [0] * layout.world_size
    result = {}
    for name, home in homes.items():
        first = layout.rank_of(0, hf_weights.stage_of(home, layout), 0)  # a stage's ranks follow each other
        owner = min(range(first, first + layout.tensor * layout.data), key=sizes.__getitem__)
        result[name] = owner
        sizes[owner] += slices.size_of(slices.whole(home.shape))
    return result


def _add_whole(shards: Shards, owners: Mapping[str, int], snapshot: Snapshot | None) -> None:
    """Copy the whole weights that this rank writes (collective: the ranks of one replica of a stage gather each)."""
    for name, owner in owners.items():
        home, place = shards.homes[name], shards.layout.coordinates(owner)
        if (place.replica, place.stage) == (shards.place.replica, shards.place.stage):
            full = shards.merged(shards.parameters[home.parameter].data, home, place.tensor_index)
            if full is not None and snapshot is not None:
                snapshot.add(name, full)


def _slices(shards: Shards, optimizer: Any) -> Snapshot:
    """Copy what this rank's optimiser holds and no other rank writes, and the states of its generators."""
    snapshot, kinds = Snapshot(), _kinds(shards)
    for name, home in shards.homes.items():
        if hf_weights.stage_of(home, shards.layout) != shards.place.stage:
            continue
        held = slice_of(optimizer, shards.parameters[home.parameter])
        if held is None or (home.split is None and shards.place.tensor_index > 0):
            continue
        runs, boxes = shards.part(home, home.parameter, *_share(shards, optimizer, held))
        for kind in kinds if boxes else ():
            parts = [held.values[kind][start - held.start : stop - held.start] for start, stop in runs]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0]  # one part needs no copy on the device
            for box, values in zip(boxes, flat.split([slices.size_of(box) for box in boxes]), strict=True):
                snapshot.add(name_of(kind, name, box), values.view(slices.shape_of(box)))
    snapshot.add(RANDOM, torch.cat(list(generators().values())))
    return snapshot


def _share(shards: Shards, optimizer: Any, held: Slice) -> tuple[int, int]:
    """Return which elements of a parameter this rank writes: where all replicas hold the same, each writes a part."""
    start, stop = held.range.start, held.range.stop
    if optimizer.config.use_distributed_optimizer:
        return start, stop
    replica, replicas = shards.place.replica, shards.layout.data
    return start + (stop - start) * replica // replicas, start + (stop - start) * (replica + 1) // replicas


def generators() -> dict[str, torch.Tensor]:
    """Return the states (uint8) of this rank's random generators: torch's own and megatron's."""
    states = {"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.cpu() for name, state in states.items()}


def _carry(partial: Path, contents: Contents, snapshots: Snapshots, sees: Sequence[bool]) -> OSError | None:
    """Send the files of ranks that do not see the directory to ranks that do (collective).

    Each of these gets about as many. Returns why this rank could not write what came.
    """
    failure: OSError | None = None
    rank = dist.get_rank()
    writers = [other for other, seen in enumerate(sees) if seen]
    for number, source in enumerate(other for other, seen in enumerate(sees) if not seen):
        writer = writers[number % len(writers)]
        for name in contents.files_of(source):
            if rank == source:
                send(snapshots[name].parts(), writer)
            if rank == writer:
                failure = write_arriving(partial / name, source) or failure
    return failure
