"""Start and stop the torch.distributed world of one training role."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hetrl.errors import GangTimeoutError


def start_world(
    rank: int,
    size: int,
    host: str,
    port: int,
    timeout_seconds: float,
    device: str,
    collective_seconds: float | None = None,
) -> None:
    """Join a world of `size` ranks that meets at rank 0's store on host:port; `stop_world` leaves it.

    `device` is cpu (gloo) or cuda:<index> (NCCL). `timeout_seconds` bounds the meeting, `collective_seconds` (None: the
    same) every later collective of the whole world: ranks that idle between requests wait in one. Raises
    GangTimeoutError when the world is not complete in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    later = timedelta(seconds=collective_seconds or timeout_seconds)
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=True
        )
        backend = "nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=later)
    except (dist.DistError, RuntimeError) as error:
        waited_for = f"the other {size - 1} ranks" if rank == 0 else "rank 0"
        raise GangTimeoutError(
            f"rank {rank} of {size}: waited {timeout_seconds:g} s for {waited_for} at {host}:{port}: "
            f"{str(error).splitlines()[0]}; look at the logs of those ranks"
        ) from error


def stop_world() -> None:
    """Leave the world; nothing happens outside one."""
    if dist.is_initialized():
        dist.destroy_process_group()
