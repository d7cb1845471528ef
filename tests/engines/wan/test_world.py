"""Worlds on several sites: their store, their groups inside a site, what crosses a link, and what they leave."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetrl.errors import GangTimeoutError, UsageError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wan import world as wan
from hetrl.runtime.wan.endpoint import Endpoint, GroupError
from hetrl.runtime.wan.store import GatewayStore, StoreError
from tests.engines.megatron.megatron_worlds import Worlds
from tests.engines.wan.wan_worlds import CONTROLLER, LAYOUTS, leftovers, run_sites, sites_of

_OWNER, _ASKER = LAYOUTS["2x1"]
_BIG = 64_000_000


def _store_calls(first: Any, second: Any) -> list[Any]:
    """Return what the calls of a store give; `first` and `second` are two clients of one store."""
    first.set("a", "1")
    answers = [second.get("a"), second.add("n", 5), first.add("n", -2), second.get("n"), first.check(["a", "n"])]
    answers += [second.check(["a", "missing"]), second.compare_set("a", "1", "2"), first.compare_set("a", "1", "3")]
    answers += [first.compare_set("fresh", "", "x"), second.compare_set("other", "y", "z"), second.check(["other"])]
    answers += [second.delete_key("a"), first.delete_key("a"), first.multi_get(["n", "fresh"])]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.wait, ["late"], timedelta(seconds=20))
        first.set("late", b"\x00\xff")
        answers += [waiting.result(), second.get("late")]
    return answers


def test_a_gateway_store_answers_as_a_tcp_store() -> None:
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    expected = _store_calls(tcp, dist.TCPStore("127.0.0.1", tcp.port, is_master=False, wait_for_workers=False))
    with sites_of(LAYOUTS["2x1"]) as sites:
        endpoints = [Endpoint(sites.member(address), LAYOUTS["2x1"]) for address in LAYOUTS["2x1"]]
        owner, asker = (GatewayStore(endpoint, _OWNER, 20.0) for endpoint in endpoints)
        assert _store_calls(owner, asker) == expected
        # torch wraps it, and calls it from C++.
        assert _store_calls(dist.PrefixStore("p", owner), dist.PrefixStore("p", asker)) == expected
        assert owner.num_keys() == asker.num_keys() == 2 * 3
        for endpoint in endpoints:
            endpoint.close()
    assert leftovers() == []


def test_a_question_that_comes_before_the_store_is_answered() -> None:
    ask = wire.StoreAsk(operation="add", keys=("n",), values=(b"4",))
    with sites_of(LAYOUTS["2x1"]) as sites:
        owner, asker = (Endpoint(sites.member(address), LAYOUTS["2x1"]) for address in LAYOUTS["2x1"])
        early = asker.submit(asker.member.request(_OWNER, ask, timeout_seconds=20, doing="add"))
        # What a member sends arrives in order: when the probe is answered, the question is there.
        assert asker.call(asker.probe(_OWNER, "g")) == ()
        assert GatewayStore(owner, _OWNER, 20.0).add("n", 3) == 7
        assert early.result().message == wire.StoreAnswer(values=(b"4",))
        for endpoint in (owner, asker):
            endpoint.close()


def test_a_key_that_does_not_come_is_named_with_who_waits() -> None:
    with sites_of(LAYOUTS["2x1"]) as sites:
        endpoints = [Endpoint(sites.member(address), LAYOUTS["2x1"]) for address in LAYOUTS["2x1"]]
        owner, asker = (GatewayStore(endpoint, _OWNER, 0.2) for endpoint in endpoints)
        with pytest.raises(StoreError, match=f"alpha: {_OWNER} waited 0.2 s for model/epoch in the store of {_OWNER}"):
            owner.get("model/epoch")
        with pytest.raises(StoreError, match=f"beta: {_ASKER} waited 0.1 s for model/epoch in the store of {_OWNER}"):
            asker.wait(["model/epoch"], timedelta(seconds=0.1))
        with pytest.raises(RuntimeError, match="model/epoch"):
            dist.PrefixStore("model", asker).get("epoch")
        for endpoint in endpoints:
            endpoint.close()
        with pytest.raises(GroupError, match="the world is stopped"):
            asker.get("anything")


def _crossed(rank: int, size: int) -> list[dict[str, int]]:
    """Return the bytes that each operation sent from this rank's site to each other site."""
    endpoint, site = wan._world.endpoint, wire.site_of(wan._world.endpoint.address)

    def counters() -> dict[str, int]:
        dist.barrier()
        stats = endpoint.member.request(f"{site}/gateway/0", wire.LinkStats(), timeout_seconds=20, doing="counters")
        sent = {other: link.bytes_sent for other, link in endpoint.call(stats).message.links.items()}
        dist.barrier()  # the other rank of the site must not send yet
        return sent

    tensor, everyone = torch.ones(2_000_000), [torch.empty(500_000) for _ in range(size)]
    calls = (
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_gather(everyone, torch.ones(500_000)),
    )
    sent = []
    for call in calls:
        before = counters()
        call()
        after = counters()
        sent.append({other: after[other] - before[other] for other in after})
    return sent


def test_each_byte_crosses_each_link_once(worlds: Worlds) -> None:
    alpha, beta, *_ = run_sites(worlds, "2x2", "wan", _crossed)
    slack = 200_000  # headers, acknowledgements, barriers and the counters themselves
    all_reduce, broadcast, all_gather = zip(alpha, beta, strict=True)
    assert all(8e6 <= link <= 8e6 + slack for sent in all_reduce for link in sent.values())
    assert 8e6 <= broadcast[0]["beta"] <= 8e6 + slack
    assert broadcast[1]["alpha"] <= slack
    assert all(4e6 <= link <= 4e6 + slack for sent in all_gather for link in sent.values())


def test_three_sites_share_an_all_reduce_evenly(worlds: Worlds) -> None:
    for all_reduce, *_ in run_sites(worlds, "3x1", "wan", _crossed):
        assert [*all_reduce.values()] == pytest.approx([2 / 3 * 8e6] * 2, rel=0.05)


def _large(rank: int, size: int) -> bool:
    tensor = torch.arange(_BIG, dtype=torch.float32)
    dist.all_reduce(tensor)
    return torch.equal(tensor, torch.arange(_BIG, dtype=torch.float32) * size)


def test_a_quarter_of_a_gigabyte(worlds: Worlds) -> None:
    assert run_sites(worlds, "2x1", "wan", _large) == [True, True]


def _bits(rank: int, size: int) -> bytes:
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(300_000, generator=generator) * 10.0 ** torch.randint(-8, 8, (300_000,), generator=generator)
    dist.all_reduce(tensor)
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("layout", ["2x2", "2+1+1"])
def test_every_rank_has_the_same_bits_every_time(worlds: Worlds, layout: str) -> None:
    assert len({bits for _ in range(2) for bits in run_sites(worlds, layout, "wan", _bits)}) == 1


def _inside(rank: int, size: int) -> tuple[str, float, float]:
    """Use a group of the two ranks of each site (ranks 0 and 3, 1 and 2), and the world beside it."""
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=30)) for ranks in ([0, 3], [1, 2])]
    mine = groups[rank in (1, 2)]
    inside, outside = torch.tensor(float(rank)), torch.tensor(float(rank))
    dist.all_reduce(inside, group=mine)
    dist.all_reduce(outside)
    kind = type(mine._get_backend(torch.device("cpu"))).__name__
    dist.destroy_process_group(mine)
    return kind, inside.item(), outside.item()


def test_a_group_inside_a_site_is_gloo(worlds: Worlds) -> None:
    assert run_sites(worlds, "2x2", "wan", _inside) == [("ProcessGroupGloo", 3.0, 6.0)] * 4


def _again(rank: int, size: int) -> list[float]:
    """Make, use and destroy a group of the same ranks over and over; torch names each as the one before."""
    sums = []
    for _ in range(3):
        group = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=20))
        if rank < 2:
            total = torch.tensor(float(rank + 1))
            dist.all_reduce(total, group=group)
            sums.append(total.item())
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    dist.barrier()
    return sums


@pytest.mark.parametrize("layout", ["2x1", "2x2"])
def test_a_group_that_was_destroyed_is_made_again(worlds: Worlds, layout: str) -> None:
    first, second, *others = run_sites(worlds, layout, "wan", _again)
    assert first == second == [3.0] * 3
    assert not any(others)


def test_ranks_that_do_not_come_are_an_error_that_names_the_first() -> None:
    with sites_of(LAYOUTS["2x1"]) as sites:
        member = sites.member(_ASKER)
        with pytest.raises(GangTimeoutError, match=f"beta: rank 1 .{_ASKER}. waited 0.5 s .*{_OWNER}"):
            wan.start_wan_world(member, LAYOUTS["2x1"], 1, timeout_seconds=0.5)
        with pytest.raises(UsageError, match=f"rank 0 of the world is {_OWNER}, and this member is {_ASKER}"):
            wan.start_wan_world(member, LAYOUTS["2x1"], 0, timeout_seconds=0.5)
    assert leftovers() == []


def _destroyed(rank: int, size: int) -> tuple[list[str], bool]:
    before = threading.active_count()
    dist.barrier(dist.new_group(list(range(size))))
    pending = dist.irecv(torch.empty(3), (rank + 1) % size)
    dist.destroy_process_group()
    try:
        pending.wait()
    except GroupError as error:
        return leftovers(), "the group was destroyed" in str(error) and threading.active_count() < before
    return leftovers(), False


def test_destroying_the_world_ends_what_it_does_and_leaves_nothing(worlds: Worlds) -> None:
    assert run_sites(worlds, "2x2", "wan", _destroyed) == [([], True)] * 4


def test_a_member_that_is_aborted_ends_the_groups_it_is_in(worlds: Worlds) -> None:
    for said in run_sites(worlds, "2x1", "wan", _aborted):
        assert "beta/actor_training.rank/0 has been silent for 12 s" in said


async def _say(member: Member, message: wire.Message) -> None:
    async with member:
        await member.send(LAYOUTS["2x1"], message)


def _aborted(rank: int, size: int) -> str:
    endpoint = wan._world.endpoint
    pending = dist.irecv(torch.empty(3), (rank + 1) % size)
    dist.barrier()
    if rank == 0:
        end = wire.Abort(cause=f"beta: {_ASKER} has been silent for 12 s")
        asyncio.run(_say(Member(CONTROLLER, "run", endpoint.member._gateway, endpoint.member._keys), end))
    try:
        pending.wait()
    except GroupError as error:
        return str(error)
    return ""
