"""The backend `wan` of torch.distributed: the worlds of a run, whose ranks are members, on one site or several.

group inside one site    gloo (CPU) and NCCL (CUDA); nothing of it passes a gateway but where its ranks meet
any other group          `WanProcessGroup`, over the gateways

Ranks meet at stores that one of them holds and the others ask through the gateway of their site, so whoever has no
key of the run meets nobody (`GatewayStore`).

    start_wan_world(member, ranks, rank, timeout_seconds=...)
    torch.distributed.all_reduce(...), new_group(...), ...
    stop_wan_world()
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hetrl.errors import GangTimeoutError, HetrlError, UsageError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wan.communicator import Communicator, Placement
from hetrl.runtime.wan.endpoint import Endpoint
from hetrl.runtime.wan.group import WanProcessGroup
from hetrl.runtime.wan.island import Island
from hetrl.runtime.wan.store import GatewayStore, StoreError
from hetrl.runtime.wan.torch_world import meet, stop_world

BACKEND = "wan"
_WORLD_KEY = "hetrl/world"


class _World:
    """What the groups of this process's world have in common."""

    def __init__(self, endpoint: Endpoint, ranks: tuple[str, ...], store: GatewayStore, island: Store) -> None:
        self.endpoint, self.ranks, self.store, self.island = endpoint, ranks, store, island
        self.name = ""
        self._made: Counter[str] = Counter()

    def meet(self, rank: int, timeout_seconds: float) -> None:
        """Wait for everyone, then agree on a name that no earlier world of these members had.

        What comes late from another world is then not taken for ours.
        """
        if rank == 0:
            self.store.set(_WORLD_KEY, secrets.token_hex(4))
        meet(self.store, self.ranks, rank, timeout_seconds)
        self.name = self.store.get(_WORLD_KEY).decode()

    def name_of(self, group: str) -> str:
        """Return a name that no earlier group had: torch gives that of a destroyed group again, for the same ranks.

        Every rank of a group makes it, so all of them count alike.
        """
        self._made[group] += 1
        return f"{self.name}/{group}" if self._made[group] == 1 else f"{self.name}/{group}.{self._made[group]}"


_world: _World | None = None


def start_wan_world(
    member: Member,
    ranks: Sequence[str],
    rank: int,
    *,
    timeout_seconds: float,
    collective_seconds: float | None = None,
    watcher: str | None = None,
) -> None:
    """Join a world whose rank i is the member `ranks[i]`; `member` is this rank's own, not yet connected.

    `timeout_seconds` bounds the meeting, `collective_seconds` (None: the same) every operation of the default group:
    ranks that idle between requests wait in one. The member `watcher`, if any, hears that the rank lives. Raises
    GangTimeoutError when the world is not complete in time, naming who did not come; UsageError when `member` is not
    `ranks[rank]`.
    """
    global _world
    if member.address != ranks[rank]:
        raise UsageError(f"rank {rank} of the world is {ranks[rank]}, and this member is {member.address}")
    if _world is not None:
        raise UsageError(f"{member.address}: this process is in a world already; stop it with stop_wan_world")
    endpoint = Endpoint(member, ranks, watcher)
    try:
        store = GatewayStore(endpoint, ranks[0], timeout_seconds)
        first_here = next(other for other in ranks if wire.site_of(other) == wire.site_of(member.address))
        island = store if first_here == ranks[0] else GatewayStore(endpoint, first_here, timeout_seconds)
        _world = _World(endpoint, tuple(ranks), store, island)
        _world.meet(rank, timeout_seconds)
        timeout = timedelta(seconds=collective_seconds or timeout_seconds)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=len(ranks), timeout=timeout)
    except (StoreError, dist.DistError) as error:
        stop_wan_world()
        raise GangTimeoutError(
            f"{wire.site_of(member.address)}: rank {rank} ({member.address}) waited {timeout_seconds:g} s for a world "
            f"of {len(ranks)} ranks: {str(error).splitlines()[0]}"
        ) from error
    except BaseException:
        stop_wan_world()
        raise


def stop_wan_world() -> None:
    """Leave the world and disconnect; nothing happens outside one."""
    stop_world()
    _disconnect()


def _disconnect() -> None:
    global _world
    world, _world = _world, None
    if world is not None:
        world.endpoint.close()


def _make_group(options: Any, _: Any) -> dist.ProcessGroup:
    """Build a group as torch asks for it: of these global ranks, all of them when it names none."""
    if _world is None:
        raise HetrlError("wan: there is no world; call start_wan_world first")
    chosen = options.global_ranks_in_group or range(len(_world.ranks))
    placement = Placement(tuple(_world.ranks[rank] for rank in chosen), options.group_rank)
    name = _world.name_of(options.group_id)
    here = wire.site_of(_world.endpoint.address)
    island_store = PrefixStore(f"{name}/{here}", _world.island)
    if len(placement.sites) == 1:
        return _inside(options, island_store)
    island = None
    if len(placement.local) > 1:
        local_rank = placement.local.index(placement.rank)
        island = Island(island_store, local_rank, len(placement.local), options.timeout)
    group = Communicator(name, placement, _world.endpoint, island)
    _world.endpoint.call(_world.endpoint.add(group))
    is_default = not options.global_ranks_in_group
    return WanProcessGroup(group, options.timeout, _disconnect if is_default else lambda: None)


def _inside(options: Any, store: Store) -> dist.ProcessGroup:
    """Build a group that lies in one site from torch's own backends."""
    kinds = dist.ProcessGroup.BackendType
    rank, size = options.group_rank, options.group_size
    group = dist.ProcessGroup(options.store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options.timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = options.timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)
        group._set_default_backend(kinds.NCCL)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group


dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])
