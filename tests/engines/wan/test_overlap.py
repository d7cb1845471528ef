"""What crosses between sites does so beside the computation: told by the order of events, each held until another."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hetrl.runtime.wan.world import stop_wan_world
from tests.engines.megatron.megatron_worlds import LAYOUTS, Job, Worlds, model_config, step_job, weights
from tests.engines.wan.wan_worlds import LAYOUTS as RANKS, Sites, engine_over, sites_of

_HELD_SECONDS = 30.0


def _reductions(rank: int, port: int, argument: tuple[Sites, Job]) -> tuple[int, bool]:
    """Hold the backward pass in front of the first layer until the last layer's gradients are reduced.

    Return how many reductions had begun then, and whether the first of them was over.
    """
    sites, job = argument
    engine = engine_over(sites, rank, port, job)
    engine.load(weights(job.config))
    engine.train_step(job.batch, job.settings)  # megatron learns which gradients a bucket waits for
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    begun, reduce = [], group.reduce_scatter_single_coalesced

    def watched(*arguments: Any) -> Any:
        begun.append(reduce(*arguments))
        return begun[-1]

    held: list[tuple[int, bool]] = []

    def hold(_: Tensor) -> None:
        if begun and not held:
            over = threading.Event()
            begun[0].get_future().add_done_callback(lambda _: over.set())
            held.append((len(begun), over.wait(_HELD_SECONDS)))

    group.reduce_scatter_single_coalesced = watched
    first_layer = next(value for name, value in engine.parameters.items() if "layers.0." in name)
    first_layer.register_hook(hold)
    engine.train_step(job.batch, job.settings)
    del group.reduce_scatter_single_coalesced
    engine.close()
    stop_wan_world()
    return held[0]


def test_buckets_are_reduced_while_the_backward_pass_goes_on(worlds: Worlds) -> None:
    job = step_job(model_config(), LAYOUTS["data"], bucket_parameters=30_000)
    with sites_of(RANKS["2x1"]) as sites:
        for begun, first_is_over in worlds.run(_reductions, 2, (sites, job)):
            assert begun >= 1
            assert first_is_over


def _sends(rank: int, port: int, argument: tuple[Sites, Job]) -> int:
    """Hold the second stage, before it takes anything, until the first one computes its second micro-batch."""
    sites, job = argument
    engine = engine_over(sites, rank, port, job)
    engine.load(weights(job.config))
    store, passes = dist.distributed_c10d._get_default_store(), []

    def count(*_: Any) -> None:
        passes.append(None)
        if len(passes) == 2:
            store.set("second micro-batch", "1")

    if rank == 0:
        engine.model.register_forward_pre_hook(count)
    else:
        store.get("second micro-batch")
    engine.train_step(job.batch, job.settings)
    engine.close()
    stop_wan_world()
    return len(passes)


def test_a_stage_computes_while_what_it_sent_crosses(worlds: Worlds) -> None:
    job = step_job(model_config(), LAYOUTS["pipeline"])
    with sites_of(RANKS["2x1"]) as sites:
        first, _ = worlds.run(_sends, 2, (sites, job))
    assert first == 4  # micro-batches of two samples
