"""One rank of the benchmark `group`: joins a world, then does what each line of JSON on stdin says, and times it."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _cpu import Cpu, cpu_of
from torch._C._distributed_c10d import TCPStore

from hetrl.runtime.transport.member import Member
from hetrl.runtime.wan.torch_world import start_world
from hetrl.runtime.wan.world import start_wan_world, stop_wan_world
from hetrl.runtime.wire.keys import read_keys

TIMEOUT_SECONDS = 300.0


def join(setup: dict[str, Any], rank: int) -> None:
    """Enter the world of the backend that the setup names."""
    host, port = setup["store"]
    if setup["backend"] == "gloo":
        store = TCPStore(host, port, is_master=rank == 0, wait_for_workers=False)
        start_world(rank, len(setup["ranks"]), store, TIMEOUT_SECONDS, "cpu")
        return
    address = setup["ranks"][rank]
    site = address.split("/")[0]
    member = Member(address, "run", setup["gateways"][site], read_keys(Path("keys.json")), Path())
    start_wan_world(member, setup["ranks"], rank, timeout_seconds=TIMEOUT_SECONDS)


def timed(operation: str, size_bytes: int, group: dist.ProcessGroup, rank: int, ranks: int) -> tuple[float, Cpu]:
    """Return the seconds of one operation on fp32, begun together, and those of the processor in this rank.

    Raises AssertionError for a wrong result.
    """
    tensor = torch.full((size_bytes // 4,), float(rank + 1))
    dist.barrier(group)
    start, before = time.monotonic(), cpu_of()
    if operation == "broadcast":
        dist.broadcast(tensor, 0, group)
        expected = 1.0
    else:
        dist.all_reduce(tensor, group=group)
        expected = ranks * (ranks + 1) / 2
    seconds, used = time.monotonic() - start, cpu_of() - before
    assert bool((tensor == expected).all()), f"rank {rank}: wrong {operation}"
    return seconds, used


def main() -> None:
    """Serve until stdin ends."""
    setup, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    join(setup, rank)
    world = len(setup["ranks"])
    groups = {size: dist.new_group(list(range(size)), timeout=timedelta(seconds=300)) for size in range(2, world + 1)}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        ranks, operation, size_bytes = json.loads(line)
        seconds, used = timed(operation, size_bytes, groups[ranks], rank, ranks)
        print(json.dumps([seconds, used.own_seconds, used.zeromq_seconds]), flush=True)
    stop_wan_world()


if __name__ == "__main__":
    main()
