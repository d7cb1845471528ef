"""What crosses between sites does so beside the computation: told by the order of events, each held until another."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from hetrl.runtime.wan import world
from hetrl.runtime.wan.world import stop_wan_world
from tests.engines.megatron.megatron_worlds import LAYOUTS, Job, Worlds, model_config, step_job, weights
from tests.engines.wan.wan_worlds import LAYOUTS as RANKS, Sites, engine_over, run_sites, sites_of

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


def _two_sums(rank: int, size: int) -> int:
    """Begin two reductions, at the last rank only once the others' parts of both are there; return how many came."""
    came = 0
    if rank == size - 1:
        assert world._world is not None
        inbox, deadline = world._world.endpoint.inbox, time.monotonic() + _HELD_SECONDS
        while (came := len({key.sequence for _, key in inbox._early})) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    shares = [torch.empty(100_000) for _ in range(2)]
    works = [dist.reduce_scatter_single(share, torch.ones(size * 100_000), async_op=True) for share in shares]
    for work, share in zip(works, shares, strict=True):
        work.wait()
        assert share.eq(size).all()
    return came


@pytest.mark.parametrize("layout", ["2x1", "2+1+1"])
def test_a_sum_is_sent_while_the_one_before_waits_for_those_of_other_sites(worlds: Worlds, layout: str) -> None:
    assert run_sites(worlds, layout, "wan", _two_sums)[-1] == 2
