"""What builds on torch.distributed finds what it expects of a group: its name, meshes, FSDP2, types, timeouts."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.engines.megatron.megatron_worlds import Worlds, message_of
from tests.engines.wan.wan_worlds import LAYOUTS, run_sites

_LAYOUT = "2x2"
_RANKS = len(LAYOUTS[_LAYOUT])


def _same_over_sites(worlds: Worlds, work: Any) -> list[Any]:
    """Return what every rank says over two sites, which is what it says in one."""
    said = run_sites(worlds, _LAYOUT, "wan", work)
    assert said == run_sites(worlds, _LAYOUT, "gloo", work)
    return said


def _functional(rank: int, size: int) -> list[list[float]]:
    group, mine = dist.group.WORLD, torch.arange(8.0) + rank
    results = [
        functional.all_reduce(mine, "sum", group),
        functional.reduce_scatter_single(mine, "sum", 0, group),
        functional.all_gather_single(mine, 0, group),
        functional.broadcast(mine, 1, group),
        *functional.all_reduce_coalesced([mine, mine + 1], "max", group),
    ]
    return [functional.wait_tensor(result).tolist() for result in results]


def test_functional_collectives(worlds: Worlds) -> None:
    first, *_ = _same_over_sites(worlds, _functional)
    assert first[0] == [_RANKS * at + sum(range(_RANKS)) for at in range(8)]


def _names(rank: int, size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    said: list[Any] = [dist.group.WORLD.group_name, dist.group.WORLD.group_desc]
    for name in ("replicas", "shards"):
        group = mesh.get_group(name)
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=group)
        said += [group.group_name, group.group_desc, mesh.get_local_rank(name), total.item()]
    said.append(dist.new_group(list(range(size)), group_desc="all of them").group_desc)
    dist.barrier()  # a rank that leaves while another one still joins a group ends it there
    return said


def test_groups_and_meshes_have_names(worlds: Worlds) -> None:
    for said in _same_over_sites(worlds, _names):
        assert said[:2] == ["0", "default_pg"]
        assert "mesh_replicas" in said


def _sharded(rank: int, size: int) -> list[list[float]]:
    """Train a model that FSDP2 shards over all ranks, and one over pairs whose sums go over the other pairs."""
    said = []
    for shape, names in (((size,), ("shards",)), ((2, size // 2), ("replicas", "shards"))):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model(torch.arange(16.0).view(2, 8) / 16 + rank + step).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        said += [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]
    return said


def test_fsdp2_shards_a_model_over_sites(worlds: Worlds) -> None:
    over_sites, in_one = (run_sites(worlds, _LAYOUT, backend, _sharded) for backend in ("wan", "gloo"))
    assert all(said == over_sites[0] for said in over_sites)
    for ours, theirs in zip(over_sites[0], in_one[0], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


_NOT_REDUCED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)


def _types(rank: int, size: int) -> list[str]:
    """Return what reductions of types without sums raise, and what went wrong with carrying them."""
    said = []
    for dtype in _NOT_REDUCED:
        whole = torch.ones(size).to(dtype)
        said.append(message_of(partial(dist.all_reduce, whole)))
        said.append(message_of(partial(dist.reduce, whole, 0)))
        said.append(message_of(partial(dist.reduce_scatter_single, whole[:1].clone(), whole)))
    sparse = torch.eye(3).to_sparse()
    said += [message_of(partial(dist.broadcast, sparse, 0)), message_of(partial(dist.all_reduce, sparse))]
    return said + _carried(rank, size)


def _carried(rank: int, size: int) -> list[str]:
    wrong = []
    for dtype in _NOT_REDUCED:
        everyone = torch.arange(float(size)).to(dtype)
        mine, gathered = everyone[rank : rank + 1].clone(), torch.zeros(size).to(dtype)
        dist.all_gather_single(gathered, mine)
        dist.broadcast(mine, 1)
        if gathered.tolist() != everyone.tolist() or mine.item() != 1:
            wrong.append(f"{dtype} is not carried as it is")
    total = torch.ones(3)
    dist.all_reduce(total)
    if total.tolist() != [size] * 3:
        wrong.append("the group is broken")
    return wrong


def test_types_that_have_no_sum_are_named_on_every_rank_and_carried(worlds: Worlds) -> None:
    for said in run_sites(worlds, _LAYOUT, "wan", _types):
        *reductions, broadcast, all_reduce = said
        assert [line.split(";")[0] for line in reductions] == [
            f"wan: {dtype} cannot be reduced" for dtype in _NOT_REDUCED for _ in range(3)
        ]
        assert broadcast == all_reduce
        assert broadcast.startswith("wan: a tensor of torch.sparse_coo, torch.float32, on cpu does not cross sites;")


def _patience(rank: int, size: int) -> tuple[str, float]:
    """Rank 0 loses its patience with an operation that is whole in the end."""
    store, total = dist.distributed_c10d._get_default_store(), torch.ones(1)
    said = ""
    if rank == 0:
        work = dist.all_reduce(total, async_op=True)
        said = message_of(partial(work.wait, timedelta(seconds=0.2)))
        store.set("over", "1")
        work.wait()
    else:
        store.get("over")
        dist.all_reduce(total)
    return said, total.item()


def test_a_wait_ends_at_its_timeout_and_leaves_the_operation_running(worlds: Worlds) -> None:
    (said, first), (_, second) = run_sites(worlds, "2x1", "wan", _patience)
    assert said == "wan: all_reduce 0 has not ended within 0.2 s"
    assert first == second == 2.0


def _bounded(rank: int, size: int) -> list[str]:
    """Rank 0 waits in vain: in a group whose timeout is set later, and in an operation that brings its own."""
    groups = [dist.new_group(list(range(size)), timeout=timedelta(seconds=60)) for _ in range(2)]
    groups[0].set_timeout(timedelta(seconds=0.5))
    options = dist.BroadcastOptions()
    options.timeout = timedelta(seconds=0.7)
    said = []
    if rank == 1:
        said.append(message_of(partial(dist.recv, torch.ones(1), 0, group=groups[0])))
        said.append(message_of(lambda: groups[1].broadcast([torch.ones(1)], options).wait()))
    dist.barrier()
    return said


def test_timeouts_of_a_group_and_of_an_operation_act(worlds: Worlds) -> None:
    _, (group, operation) = run_sites(worlds, "2x1", "wan", _bounded)
    assert "nothing came for 0.5 s; rank 0 (alpha/actor_training.rank/0, site alpha) lives and is in" in group
    assert "nothing came for 0.7 s; rank 0 (alpha/actor_training.rank/0, site alpha) lives and is in" in operation
