"""A run group over real members and gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.runtime.wan.run_group import RunGroupHost, RunGroupMember
from tests.engines.wan.wan_worlds import sites_of

_HOST, _A, _B, _C = (
    "alpha/controller/0",
    "alpha/actor_training.rank/0",
    "beta/actor_training.rank/0",
    "beta/actor_generation/1",
)
_SECONDS = 20.0


async def _hear(member: Member, end: RunGroupHost | RunGroupMember) -> None:
    while True:
        assert await end.hear(await member.receive())


@asynccontextmanager
async def _run_group() -> AsyncIterator[tuple[RunGroupHost, list[Member], list[RunGroupMember]]]:
    with sites_of((_HOST, _A, _B, _C)) as sites:
        async with AsyncExitStack() as stack:
            members = [await stack.enter_async_context(sites.member(address)) for address in sites.ranks]
            host = RunGroupHost(members[0])
            agents = [RunGroupMember(member, _HOST) for member in members[1:]]
            hearing = [asyncio.create_task(_hear(*pair)) for pair in zip(members, (host, *agents), strict=True)]
            await host.start((_A, _B))
            await asyncio.gather(*(agent.entered(1, _SECONDS) for agent in agents[:2]))
            yield host, members[1:], agents
            for task in hearing:
                task.cancel()
            await asyncio.gather(*hearing, return_exceptions=True)


def test_members_join_meet_share_and_leave() -> None:
    async def scenario() -> None:
        async with _run_group() as (_, members, agents):
            await members[2].send(_HOST, wire.Join(ranks=1, host="h", pid=1, engines={}))
            await asyncio.gather(*(agent.entered(2, _SECONDS) for agent in agents))
            assert {agent.members for agent in agents} == {(_A, _B, _C)}
            await asyncio.gather(*(agent.barrier("first", _SECONDS) for agent in agents))
            await agents[0].share("version", b"7", _SECONDS)
            assert [await agent.value("version", _SECONDS) for agent in agents] == [b"7"] * 3
            await agents[1].leave(_SECONDS)
            await agents[0].entered(3, _SECONDS)
            assert (agents[0].members, agents[0].left) == ((_A, _C), {_B: "it asked to leave"})
            with pytest.raises(
                HetrlError, match="barrier late: beta/actor_training.rank/0 is no member in epoch 3; join first"
            ):
                await agents[1].barrier("late", _SECONDS)

    asyncio.run(scenario())


def test_a_barrier_ends_when_a_member_is_declared_dead() -> None:
    async def scenario() -> None:
        async with _run_group() as (host, _, agents):
            waiting = asyncio.create_task(agents[0].barrier("step 3", _SECONDS))
            while not host.group.arrived:
                await asyncio.sleep(0.01)
            await host.declare_dead(_B, "silent for 60 s")
            with pytest.raises(HetrlError, match=r"epoch 1 is over, this is epoch 2 since \S+ left \(silent"):
                await waiting

    asyncio.run(scenario())


def test_an_abort_of_one_reaches_everybody_with_its_cause() -> None:
    async def scenario() -> None:
        async with _run_group() as (_, members, agents):
            await agents[1].abort("out of disk")
            for member in members[:2]:
                with pytest.raises(RunAborted, match=f"{_B}: out of disk"):
                    while True:
                        await member.receive(_SECONDS)

    asyncio.run(scenario())
