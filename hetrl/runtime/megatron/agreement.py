"""What the ranks of a world tell each other: what went wrong at one, who has got how far, files that another lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hetrl.errors import HetrlError
from hetrl.runtime.megatron.snapshot import CHUNK_BYTES, write_parts

CAUSE_BYTES = 1000  # of a message that crosses; longer ones are cut off


def agree(failure: Exception | None, what: str) -> None:
    """Raise HetrlError on every rank when one rank failed, naming the lowest that did and its cause (collective).

    `what` stands ahead of the cause of an error that is not a HetrlError. A rank that failed raises its own.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    failed = torch.tensor(world if failure is None else rank)
    dist.all_reduce(failed, op=dist.ReduceOp.MIN)
    first = int(failed.item())
    if first == world:
        return
    message = str(failure) if isinstance(failure, HetrlError) else f"{what}: {failure}"
    written = message.encode()[:CAUSE_BYTES].ljust(CAUSE_BYTES, b"\0") if rank == first else bytes(CAUSE_BYTES)
    shared = torch.frombuffer(bytearray(written), dtype=torch.uint8)
    dist.broadcast(shared, first)
    if isinstance(failure, HetrlError):
        raise failure
    if failure is not None:
        raise HetrlError(message) from failure
    cause = bytes(shared.tolist()).rstrip(b"\0").decode(errors="replace")
    raise HetrlError(f"rank {first}: {cause}")


def everywhere(flag: bool) -> list[bool]:
    """Return what each rank passed, by rank (collective)."""
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    flags[dist.get_rank()] = int(flag)
    dist.all_reduce(flags)
    return [bool(value) for value in flags.tolist()]


def send(parts: Iterable[torch.Tensor], to: int) -> None:
    """Send bytes (uint8) that another rank takes with `receive`."""
    for part in parts:
        dist.send(torch.tensor([part.numel()]), to)
        dist.send(part, to)
    dist.send(torch.tensor([0]), to)


def receive(source: int) -> Iterator[torch.Tensor]:
    """Yield what `send` sends, to its end; raises HetrlError for a part that is longer than any that it sends."""
    while True:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source)
        if not length.item():
            return
        if not 0 < length.item() <= CHUNK_BYTES:
            raise HetrlError(f"rank {source} sends {length.item()} bytes at once, which no rank does")
        part = torch.empty(int(length.item()), dtype=torch.uint8)
        dist.recv(part, source)
        yield part


def write_arriving(path: Path, source: int) -> OSError | None:
    """Write what `send` sends to a file; return why that failed: the other rank sends on all the same."""
    arriving, failure = receive(source), None
    try:
        write_parts(path, arriving)
    except OSError as error:
        failure = error
        for _ in arriving:
            pass
    return failure
