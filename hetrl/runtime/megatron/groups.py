"""Megatron's groups of ranks, which are global in a process, over a running torch.distributed world."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from hetrl.errors import HetrlError
from hetrl.runtime.megatron import cpu as megatron_cpu
from hetrl.runtime.megatron.layout import Layout


def require_world(layout: Layout, rank: int) -> None:
    """Raise HetrlError where this is not `rank` of a running world of the layout's size."""
    if not dist.is_initialized() or (dist.get_world_size(), dist.get_rank()) != (layout.world_size, rank):
        raise HetrlError(f"rank {rank}: the layout needs a running world of {layout.world_size}; see start_world")


def join_groups(layout: Layout, seed: int, timeout_seconds: float) -> None:
    """Make megatron's groups, each collective of which may take so long, and seed what their ranks draw."""
    megatron_cpu.install()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        distributed_timeout_minutes=timeout_seconds / 60.0,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)


def leave_groups() -> None:
    """Undo `join_groups`; the world goes on."""
    parallel_state.destroy_model_parallel()
