"""Save and restore one rank's share of a training engine's state; the files are those of `checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError, safe_open

from hetrl.errors import HetrlError
from hetrl.runtime.megatron import checkpoint_files as checkpoint, hf_weights
from hetrl.runtime.megatron.checkpoint_files import RANDOM, TENSOR_FILES, WEIGHTS
from hetrl.runtime.megatron.optimizer import set_steps, slice_of
from hetrl.runtime.megatron.shards import Shards, to_rank_0

Stream = Iterator[tuple[str, torch.Tensor]]


def save(
    shards: Shards, optimizer: Any, directory: Path, config: Mapping[str, Any], steps: int, extra: Mapping[str, Any]
) -> None:
    """Write weights, optimiser and generators to a checkpoint at `directory` (collective; rank 0 writes).

    Raises HetrlError on every rank when `extra` is not JSON, or when rank 0 cannot write; what it began stays
    half-written and is never loaded.
    """
    try:
        json.dumps(extra)
    except (TypeError, ValueError) as error:
        raise HetrlError(f"{directory}: what a checkpoint keeps must be JSON: {error}") from error
    state = {"format": checkpoint.FORMAT, "steps": steps, "layout": _layout(shards), "extra": dict(extra)}
    shapes = {name: home.shape for name, home in shards.homes.items()}
    files: dict[str, tuple[dict[str, tuple[int, ...]], torch.dtype, Stream]] = {
        file: (shapes, torch.float32, shards.stream(_whole(shards, optimizer, kind), torch.float32))
        for kind, file in TENSOR_FILES.items()
    }
    mine = torch.cat(list(_generators().values()))
    ranks = {f"rank.{rank}": tuple(mine.shape) for rank in range(shards.layout.world_size)}
    files[RANDOM] = (ranks, torch.uint8, _gathered(shards, mine))
    failure = None
    if dist.get_rank() == 0:
        try:
            _write(directory, files, {checkpoint.CONFIG: config, checkpoint.STATE: state})
        except OSError as error:
            failure = error
    for _, _, stream in files.values():  # the other ranks send on, whatever becomes of the files
        for _ in stream:
            pass
    _agree(failure, f"{directory}: the checkpoint could not be written", shards.device)


def _write(directory: Path, files: Mapping[str, Any], small: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the files of a checkpoint as their tensors come."""
    partial = checkpoint.begin(directory)
    for name, (shapes, dtype, stream) in files.items():
        checkpoint.write_tensors(partial / name, shapes, dtype, stream)
    for name, value in small.items():
        checkpoint.write_json(partial / name, value)
    checkpoint.finish(directory)


def restore(shards: Shards, optimizer: Any, directory: Path) -> dict[str, Any]:
    """Take the state of a checkpoint, whatever layout wrote it, and return its state.json (collective).

    Every rank reads the files. Without an optimiser (None) only the weights are taken. Raises HetrlError on every rank,
    naming the file or the tensor, when one rank cannot read it or the checkpoint is of another model; the weights are
    then undefined.
    """
    failure, state = None, {}
    try:
        state = checkpoint.read_state(directory)
        for kind in TENSOR_FILES if optimizer is not None else [WEIGHTS]:
            _take_file(shards, optimizer, directory / TENSOR_FILES[kind], kind)
        if optimizer is not None:
            set_steps(optimizer, int(state["steps"]))
        if state["layout"] == _layout(shards):
            _take_generators(directory / RANDOM)
    except (HetrlError, OSError, SafetensorError) as error:
        failure = error
    _agree(failure, f"{directory}: the checkpoint could not be loaded", shards.device)
    return state


def _agree(failure: Exception | None, what: str, device: torch.device) -> None:
    """Raise on every rank when one rank failed."""
    failed = torch.tensor(int(failure is not None), device=device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failure is not None:
        raise failure if isinstance(failure, HetrlError) else HetrlError(f"{what}: {failure}") from failure
    if failed.item():
        raise HetrlError(f"{what} by another rank; see the logs of the other ranks")


def _layout(shards: Shards) -> dict[str, Any]:
    layout = shards.layout
    return {"tensor": layout.tensor, "stages": [list(stage) for stage in layout.stages], "data": layout.data}


def _whole(shards: Shards, optimizer: Any, kind: str) -> Callable[[str], torch.Tensor]:
    """Return a function that gives all values of one of this rank's parameters on the first replica (collective)."""

    def values(name: str) -> torch.Tensor:
        parameter = shards.parameters[name]
        held = slice_of(optimizer, parameter)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=shards.device)
        if held is not None:
            whole[held.range] = held.values[kind]
        if shards.layout.data > 1 and sharded:
            dist.reduce(whole, group=replicas, group_dst=0)
        return whole.view(parameter.shape)

    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = optimizer.config.use_distributed_optimizer
    return lru_cache(maxsize=2)(values)  # q, k and v follow each other (with their biases): one gathering for the three


def _take_file(shards: Shards, optimizer: Any, path: Path, kind: str) -> None:
    """Take one kind of values of all of this rank's parameters from a file of whole tensors."""
    with safe_open(path, framework="pt", device="cpu") as file:
        hf_weights.missing_and_surplus(set(file.keys()), shards.homes)
        for name, parameter in shards.parameters.items():
            values = shards.assemble(name, file.get_tensor)
            if kind == WEIGHTS:
                parameter.data.copy_(values)
            held = slice_of(optimizer, parameter) if optimizer is not None else None
            if held is not None:
                held.values[kind].copy_(values.view(-1)[held.range])


def _generators() -> dict[str, torch.Tensor]:
    """Return the states (uint8) of this rank's random generators: torch's own and megatron's."""
    states = {"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.cpu() for name, state in states.items()}


def _gathered(shards: Shards, mine: torch.Tensor) -> Stream:
    """Yield the generators' states of all ranks on rank 0 (collective)."""
    for rank in range(shards.layout.world_size):
        received = to_rank_0(mine.to(shards.device), rank, tuple(mine.shape), torch.uint8, shards.device)
        if received is not None:
            yield f"rank.{rank}", received


def _take_generators(path: Path) -> None:
    """Put this rank's random generators where the file says."""
    with safe_open(path, framework="pt", device="cpu") as file:
        packed = file.get_tensor(f"rank.{dist.get_rank()}")
    sizes = {name: state.numel() for name, state in _generators().items()}
    if packed.numel() != sum(sizes.values()):
        return  # written on another kind of device: generators start from their seeds
    parts = packed.split(list(sizes.values()))
    states = {name: part.clone() for name, part in zip(sizes, parts, strict=True)}
    torch.set_rng_state(states.pop("torch"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    get_cuda_rng_tracker().set_states(states)
