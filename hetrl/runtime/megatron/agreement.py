"""What the ranks of a world tell each other: what went wrong at one, and who has got how far."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hetrl.errors import HetrlError

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
