"""What the other ranks hear when one of them dies, is late, or calls something else."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetrl.errors import HetrlError
from hetrl.runtime.wan.world import stop_wan_world
from tests.engines.megatron.megatron_worlds import Worlds
from tests.engines.wan.wan_worlds import LAYOUTS, Sites, leftovers, run_sites, sites_of

_SECONDS = 3.0


def _group(size: int) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(range(size)), timeout=timedelta(seconds=_SECONDS))
    return group


def _error_of(call: Any, *arguments: Any, **named: Any) -> str:
    """Return what a call raises."""
    try:
        call(*arguments, **named)
    except HetrlError as error:
        return str(error)
    return "nothing"


def _die_mid_operation(rank: int, sites: Sites, victim: int, answers: Any) -> None:
    torch.set_num_threads(1)
    sites.join(rank, 0)
    group = _group(len(sites.ranks))
    dist.all_reduce(torch.ones(1), group=group)
    tensor = torch.ones(40_000_000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    first = _error_of(work.wait)
    later = _error_of(dist.broadcast, tensor, 0, group=group)
    stop_wan_world()
    answers.put((rank, first, later, leftovers()))


@pytest.mark.parametrize(("layout", "victim"), [("2x2", 2), ("2x1", 1)])
def test_a_rank_that_is_killed_mid_operation_is_named_by_every_survivor(layout: str, victim: int) -> None:
    ranks = LAYOUTS[layout]
    context = get_context("spawn")
    with sites_of(ranks) as sites:
        answers = context.Queue()
        processes = [
            context.Process(target=_die_mid_operation, args=(rank, sites, victim, answers))
            for rank in range(len(ranks))
        ]
        for process in processes:
            process.start()
        told = [answers.get(timeout=120) for _ in range(len(ranks) - 1)]
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [
            -signal.SIGKILL if rank == victim else 0 for rank in range(len(ranks))
        ]
    assert {rank for rank, *_ in told} == set(range(len(ranks))) - {victim}
    site = ranks[victim].split("/")[0]
    for rank, first, later, left in told:
        assert f"rank {victim} ({ranks[victim]}, site {site}) does not answer" in first
        assert first.startswith("wan: all_reduce 1 of group ")
        assert f"at rank {rank} ({ranks[rank]}, " in first
        assert later.startswith("wan: broadcast 2 of group ")
        assert ranks[victim] in later
        assert left == []


def _late(rank: int, size: int) -> str:
    group = _group(size)
    dist.barrier(group)
    said = _error_of(dist.all_reduce, torch.ones(5), group=group) if rank == 0 else ""
    dist.barrier()
    return said


def test_a_rank_that_does_not_call_the_operation_is_named(worlds: Worlds) -> None:
    said, *_ = run_sites(worlds, "2x1", "wan", _late)
    assert "all_reduce 1 of group" in said
    assert f"nothing came for {_SECONDS:g} s" in said
    assert "rank 1 (beta/actor_training.rank/0, site beta) lives and is in no operation of this group" in said


def _different(rank: int, size: int) -> list[str]:
    sizes = _error_of(dist.all_reduce, torch.ones(5 + rank), group=_group(size))
    types = _error_of(dist.broadcast, torch.ones(4, dtype=(torch.int32, torch.float32)[rank]), 0, group=_group(size))
    return [sizes, types]


def test_sizes_and_types_that_differ_are_named(worlds: Worlds) -> None:
    for sizes, types in run_sites(worlds, "2x1", "wan", _different):
        assert "20 bytes of float32" in sizes
        assert "24 bytes of float32" in sizes
        assert ("int32" in types) == ("float32" in types)
    assert "alpha/actor_training.rank/0 sends 16 bytes of int32, expected are 16 bytes of float32" in types


def _unsupported(rank: int, size: int) -> list[str]:
    tensor = torch.ones(size)
    calls = [
        (dist.all_to_all_single, torch.empty(size), tensor),
        (dist.gather, tensor, [torch.empty(size) for _ in range(size)] if rank == 0 else None),
        (dist.all_reduce, torch.ones(1, dtype=torch.int32), dist.ReduceOp.BAND),
        (dist.all_reduce, torch.ones(1, dtype=torch.int32), dist.ReduceOp.AVG),
        (dist.recv, tensor),
    ]
    said = [_error_of(*call) for call in calls]
    dist.barrier()
    return said


def test_what_is_not_supported_says_so(worlds: Worlds) -> None:
    for said in run_sites(worlds, "2x1", "wan", _unsupported):
        assert [line.split(";")[0] for line in said] == [
            "wan: all_to_all is not supported across sites",
            "wan: gather is not supported across sites",
            "wan: a reduction with BAND is not supported across sites",
            "wan: the average of torch.int32 is not one",
            "wan: recv from any source is not supported across sites",
        ]
