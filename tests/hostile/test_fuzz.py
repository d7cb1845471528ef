"""Two hundred thousand frames that nobody sends, into a gateway and into members of every role."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hetrl.runtime import wire
from hetrl.runtime.wire.authority import OfTheTable
from lab.hostile.ear import RUN, Ear
from lab.hostile.feeding import ROLES, all_forgiven, connected, feed_gateway, feed_member, served
from lab.hostile.fuzzer import Fuzzer
from tests.engines.transport.transport_runs import CONTROLLER, MEMBERS, TRAINER, members, running
from tests.hostile.test_authority import SOURCES

FRAMES = 200_000


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with all_forgiven():
        yield


@pytest.mark.parametrize("role", ROLES)
def test_members_outlive_whatever_is_said_to_them(role: str) -> None:
    address = wire.address("alpha", role)
    sources = [wire.address(site, source) for source in SOURCES for site in ("alpha", "beta")]
    fuzzer = Fuzzer(RUN, sources, (address, address, "alpha/other/0"))

    async def scenario() -> None:
        ear = Ear(address)
        asked = ear.mailbox.expect(2, sources[0])
        feed_member(ear, fuzzer.frames(seed=ROLES.index(role), count=FRAMES // 2 // len(ROLES)))
        assert ear.offences.total > 1000
        asked.cancel()

    asyncio.run(scenario())


def test_a_gateway_outlives_whatever_is_said_to_it_and_serves_its_members() -> None:
    receivers = (*MEMBERS, "alpha/gateway/0", "alpha/invented/0", "delta/controller/0")
    fuzzer = Fuzzer("run", (*MEMBERS, "beta/gateway/0", "gamma/gateway/0", "beta/invented/0"), receivers)

    async def scenario() -> None:
        async with (
            running("alpha", authority=OfTheTable(), lane_bytes=2**20) as run,
            members(run, CONTROLLER, TRAINER) as (controller, trainer),
        ):
            await connected(controller, trainer)
            gateway = run.gateways["alpha"]
            await feed_gateway(gateway, ("beta", "gamma"), fuzzer.frames(seed=1, count=FRAMES // 2))
            assert gateway.stats().malformed > FRAMES / 4
            assert await served(controller, trainer)

    asyncio.run(scenario())
