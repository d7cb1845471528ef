"""Start and stop a torch.distributed world that needs no gateway: its ranks share a machine, or meet at a given store.

The worlds of a run are those of `hetrl.runtime.wan.world`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hetrl.errors import GangTimeoutError

_MET = "hetrl/met"
# NCCL has no collectives for tensors on the CPU, which carry what one rank tells the others.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def start_world(rank: int, size: int, store: Store, timeout_seconds: float, device: str) -> None:
    """Join a world of `size` ranks that meet at a store; `stop_world` leaves it.

    `device` is cpu or cuda:<index>. `timeout_seconds` bounds the meeting and every later collective. Raises
    GangTimeoutError when the world is not complete in time.
    """
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    meet(store, [str(number) for number in range(size)], rank, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(BACKENDS[where.type], store=store, rank=rank, world_size=size, timeout=timeout)


def meet(store: Store, names: Sequence[str], rank: int, timeout_seconds: float) -> None:
    """Wait until every rank is at the store; raises GangTimeoutError with the names of those that did not come.

    torch's backends would wait for them as long as for any collective, and name nobody.
    """
    keys = [f"{_MET}/{name}" for name in names]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        late = [name for name, key in zip(names, keys, strict=True) if not store.check([key])]
        raise GangTimeoutError(
            f"rank {names[rank]} of {len(names)} waited {timeout_seconds:g} s for rank {', '.join(late)} "
            f"({str(error).splitlines()[0]}); look at the logs of those ranks"
        ) from error


def stop_world() -> None:
    """Leave the world; nothing happens outside one."""
    if dist.is_initialized():
        dist.destroy_process_group()
