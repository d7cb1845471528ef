"""Worlds of a run of which only this rank is there: collectives end at once, and leave their tensors as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork

from hetrl.runtime.wan import world

_KEPT: list[Any] = []  # a library's kernels go when it does


class LoneStore(dist.Store):
    """A store in which everything is found, as if the other ranks had written it."""

    def set(self, key: str, value: str | bytes) -> None:
        """Forget it."""

    def get(self, key: str) -> bytes:
        """Return some text."""
        return b"0"

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Do not wait."""


class LoneEndpoint:
    """A member that is connected to nobody."""

    def __init__(self, member: Any, ranks: Sequence[str], watcher: str | None = None) -> None:
        self.address = member.address

    def close(self) -> None:
        """Do nothing."""


def install() -> None:
    """Let the worlds of this process be of one rank; gloo and NCCL serve the devices that they serve on a node."""
    world.Endpoint = LoneEndpoint  # type: ignore[assignment, misc]
    world.GatewayStore = lambda *_: LoneStore()  # type: ignore[assignment, misc]
    dist.ProcessGroupGloo = _backend()  # type: ignore[assignment, misc]
    dist.ProcessGroupNCCL = _backend()

    def all_gather_object(gathered: list[Any], ours: Any, group: Any = None) -> None:
        gathered[:] = [ours] * len(gathered)

    dist.all_gather_object = all_gather_object
    meta = torch.library.Library("c10d", "IMPL")
    for name in ("allreduce_coalesced_", "reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_"):
        meta.impl(name, lambda *args, **kwargs: _work(), "Meta")  # torch has those of the other operations
    _KEPT.append(meta)


def _backend() -> type:
    class Backend:
        class Options:
            _timeout = timedelta()

        def __new__(cls, store: dist.Store, rank: int, size: int, *_: Any) -> FakeProcessGroup:  # type: ignore[misc]
            return FakeProcessGroup._create_internal(rank, size)

    return Backend


def _work() -> Any:
    work = FakeWork()
    work.seq_id = 0
    return work.boxed()


def leave() -> None:
    """Leave the world that a rank did not leave."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    with contextlib.suppress(ValueError, AssertionError):
        world.stop_wan_world()
