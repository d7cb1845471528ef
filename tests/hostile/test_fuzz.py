"""Two hundred thousand frames that nobody sends, into a gateway and into members of every role."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from hetrl.runtime import wire
from hetrl.runtime.transport.lane import now
from hetrl.runtime.transport.member import Member
from hetrl.runtime.transport.offences import Offences
from hetrl.runtime.wire.authority import OfTheTable
from lab.hostile.ear import RUN, Ear
from lab.hostile.fuzzer import Fuzzer
from tests.engines.transport.transport_runs import CONTROLLER, MEMBERS, TRAINER, members, running
from tests.hostile.test_authority import ROLES, SOURCES

FRAMES = 200_000


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is cut off is not heard: here every frame is to be looked at."""
    add = Offences.add

    def forgive(offences: Offences, peer: str, what: object, *, forgiven: bool = False) -> None:
        add(offences, peer, what, forgiven=True)

    monkeypatch.setattr(Offences, "add", forgive)


@pytest.mark.parametrize("role", ROLES)
def test_members_outlive_whatever_is_said_to_them(role: str) -> None:
    address = wire.address("alpha", role)
    sources = [wire.address(site, source) for source in SOURCES for site in ("alpha", "beta")]
    fuzzer = Fuzzer(RUN, sources, (address, address, "alpha/other/0"))

    async def scenario() -> None:
        ear = Ear(address)
        asked = ear.mailbox.expect(2, sources[0])
        for number, frames in enumerate(fuzzer.frames(seed=ROLES.index(role), count=FRAMES // 2 // len(ROLES))):
            ear.hear(frames)
            if number % 100 == 0:
                ear.exchange.tick(now())
                ear.exchange.settle()
        assert ear.offences.total > 1000
        asked.cancel()

    asyncio.run(scenario())


def test_a_gateway_outlives_whatever_is_said_to_it_and_serves_its_members() -> None:
    receivers = (*MEMBERS, "alpha/gateway/0", "alpha/invented/0", "delta/controller/0")
    fuzzer = Fuzzer("run", (*MEMBERS, "beta/gateway/0", "gamma/gateway/0", "beta/invented/0"), receivers)
    saved = wire.Saved(step=1, directory="d", seconds=0.0, whole=True)

    async def scenario() -> None:
        async with (
            running("alpha", authority=OfTheTable(), lane_bytes=2**20) as run,
            members(run, CONTROLLER, TRAINER) as (controller, trainer),
        ):
            await trainer.send(CONTROLLER, wire.Heartbeat())
            await controller.receive(20)
            gateway = run.gateways["alpha"]
            for number, frames in enumerate(fuzzer.frames(seed=1, count=FRAMES // 2)):
                gateway.hear(("beta", "gamma")[number % 2], b"somebody", [zmq.Frame(frame) for frame in frames])
                if number % 1000 == 0:
                    await asyncio.sleep(0)
            assert gateway.stats().malformed > FRAMES / 4
            answering = asyncio.create_task(_answered(trainer, saved))
            reply = await controller.request(
                TRAINER, wire.Save(step=1, version=1), timeout_seconds=60, doing="after it"
            )
            assert reply.message == saved
            await answering

    asyncio.run(scenario())


async def _answered(member: Member, message: wire.Message) -> None:
    while not isinstance((envelope := await member.receive(60)).message, wire.Save):
        continue
    await member.reply(envelope, message)
