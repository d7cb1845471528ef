"""What a site of the run that was broken into tries; the others go on, name it, and lose nothing but its word."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from msgspec.structs import replace

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport import channel, exchange, member
from hetrl.runtime.transport.member import Member, RunAborted
from hetrl.runtime.transport.offences import MOST_OFFENCES
from hetrl.runtime.transport.sockets import client_socket
from hetrl.runtime.wire.authority import OfTheTable
from lab.hostile.ear import PLAIN
from tests.engines.transport.transport_runs import (
    BETA,
    CONTROLLER,
    GAMMA,
    TRAINER,
    Run,
    answer,
    members,
    running,
    stats,
    until,
)

MIB = 2**20
_STEP = {"timeout_seconds": 20.0, "doing": "step 12"}
_SAMPLING = wire.Sampling(samples=1, max_tokens=1, temperature=1.0, top_p=1.0, seed=0)
_GENERATE = wire.Generate(draw=1, prompt=(1,), sampling=_SAMPLING)
_GENERATED = wire.Generated(samples=(), seconds=0.0)
_NESTED = b"\x91" * 100_000  # arrays in arrays
_SAVED = wire.Saved(step=1, directory="d", seconds=0.0, whole=True)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What members counted is soon at their gateways, where these tests wait for it."""
    monkeypatch.setattr(member, "HELLO_SECONDS", 0.2)


class Burglar:
    """Whoever has the keys of beta, and speaks to a gateway as its own."""

    def __init__(self, run: Run, site: str) -> None:
        self._context: zmq.Context = zmq.Context()
        self._socket = client_socket(self._context, run.keys["beta"], run.keys[site].public)
        self._socket.connect(run.endpoints[site])
        self._ids = itertools.count(1)
        self._sequences: Counter[tuple[str, str]] = Counter()

    async def send(self, frames: list[bytes]) -> None:
        while True:
            try:
                return self._socket.send_multipart(frames, flags=zmq.DONTWAIT)
            except zmq.Again:
                await asyncio.sleep(0.001)

    async def say(
        self,
        message: wire.Message,
        to: str = CONTROLLER,
        source: str = BETA,
        reply_to: int | None = None,
        buffers: Sequence[bytes] = (),
    ) -> None:
        """Say something as a member or gateway of beta would, in the channel to `to` unless it travels outside."""
        struct = wire.encode_struct(message)
        header = wire.Header(run="run", source=source, to=(to,), id=next(self._ids), reply_to=reply_to)
        if not isinstance(message, PLAIN):
            place = wire.Place(stream=1, sequence=self._sequences[source, to])
            self._sequences[source, to] += 1
            header = replace(header, incarnation=3, places=(place,), sizes=(len(struct), *map(len, buffers)))
        await self.send([wire.encode_struct(header), struct, *buffers])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@asynccontextmanager
async def broken_into(*others: str) -> AsyncIterator[tuple[Run, Burglar, list[Member]]]:
    """Alpha and gamma as they should be, with these members; at beta, whose gateway is up, sits a burglar."""
    async with running(authority=OfTheTable()) as run, members(run, *others) as honest:
        burglar = Burglar(run, "alpha")
        try:
            yield run, burglar, honest
        finally:
            burglar.close()


async def served(controller: Member, other: Member) -> None:
    """Gamma is asked and answers."""
    answering = asyncio.create_task(answer(other, _GENERATED))
    assert (await controller.request(other.address, _GENERATE, **_STEP)).message == _GENERATED
    await answering


async def counted(controller: Member, site: str, peer: str, count: int) -> None:
    async with asyncio.timeout(20):
        while (await stats(controller, site)).offences.get(peer, 0) < count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x81\xa1x" + _NESTED, b""],
        [b"\x81\xa6source" + _NESTED, b""],
        wire.encode(wire.Header(run="run", source=BETA, to=("a/b/0",) * 80_000, id=1), wire.Done()),
        wire.encode(wire.Header(run="run", source=BETA, to=(CONTROLLER,), id=1, sizes=(1,) * 10**6), wire.Done()),
        [b""],
    ],
    ids=["nested", "nested in a field", "receivers", "sizes", "nothing"],
)
def test_a_gateway_outlives_a_frame_that_nobody_sends(frames: list[bytes]) -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, burglar, (controller, gamma)):
            started = time.monotonic()
            await burglar.send([bytes(frame) for frame in frames])
            await counted(controller, "alpha", "beta", 1)
            assert time.monotonic() - started < 10  # 80,000 receivers took eleven seconds to look at
            await served(controller, gamma)

    asyncio.run(scenario())


def test_a_member_outlives_a_message_that_nobody_sends_and_hears_its_source_still() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, burglar, (controller, gamma)):
            header = wire.Header(run="run", source=BETA, to=(CONTROLLER,), id=1)
            for struct in (_NESTED, b"\x81\xa1x" + _NESTED, b"\xc1"):
                await burglar.send([wire.encode_struct(header), struct])
            await burglar.say(wire.Heartbeat())
            assert (await controller.receive(20)).message == wire.Heartbeat()
            assert controller.offences == {BETA: 3}
            await served(controller, gamma)

    asyncio.run(scenario())


def test_a_site_that_offends_time_and_again_is_cut_off_and_named() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, burglar, (controller, gamma)):
            asking = asyncio.create_task(controller.request(BETA, _GENERATE, timeout_seconds=300, doing="step 12"))
            for _ in range(MOST_OFFENCES):
                await burglar.send([b"\xc1", b""])
            with pytest.raises(HetrlError, match=f"alpha/gateway/0 cut beta off after {MOST_OFFENCES} messages"):
                await asking
            with pytest.raises(HetrlError, match="cut beta off"):
                await controller.request(BETA, _GENERATE, **_STEP)
            await burglar.say(wire.Heartbeat())
            await served(controller, gamma)
            assert (await stats(controller, "alpha")).offences == {"beta": MOST_OFFENCES}

    asyncio.run(scenario())


def test_a_member_that_offends_time_and_again_is_cut_off_and_named() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, burglar, (controller, gamma)):
            asking = asyncio.create_task(controller.request(BETA, _GENERATE, timeout_seconds=300, doing="step 12"))
            for _ in range(MOST_OFFENCES):
                await burglar.say(wire.Go())
            with pytest.raises(HetrlError, match=f"{CONTROLLER} cut {BETA} off after {MOST_OFFENCES} messages"):
                await asking
            with pytest.raises(HetrlError, match="cut .* off"):
                await controller.request(BETA, _GENERATE, **_STEP)
            await served(controller, gamma)
            await counted(controller, "alpha", BETA, MOST_OFFENCES)

    asyncio.run(scenario())


def test_an_answer_counts_from_whom_it_was_asked() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, TRAINER) as (_, burglar, (controller, trainer)):
            save = wire.Save(step=1, version=1)
            asking = asyncio.create_task(controller.request(TRAINER, save, **_STEP))
            question = await trainer.receive(20)
            await burglar.say(_SAVED, reply_to=question.header.id)
            await burglar.say(_GENERATED, reply_to=question.header.id)
            await counted(controller, "alpha", BETA, 2)
            assert not asking.done()
            await trainer.reply(question, _SAVED)
            assert (await asking).header.source == TRAINER

    asyncio.run(scenario())


def test_an_answer_of_another_kind_is_an_error_that_names_it() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, _, (controller, gamma)):
            answering = asyncio.create_task(answer(gamma, wire.Done()))
            with pytest.raises(HetrlError, match=f"{GAMMA} answered Generate with Done .step 12"):
                await controller.request(GAMMA, _GENERATE, **_STEP)
            await answering

    asyncio.run(scenario())


def test_a_site_says_of_its_own_members_alone_that_they_cannot_be_reached() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, burglar, (controller, gamma)):
            asking = asyncio.create_task(controller.request(GAMMA, _GENERATE, **_STEP))
            question = await gamma.receive(20)
            for receiver, reply_to in ((GAMMA, question.header.id), (GAMMA, None), ("gamma", None)):
                gone = wire.Undeliverable(receiver=receiver, cause="x")
                await burglar.say(gone, source="beta/gateway/0", reply_to=reply_to)
            await counted(controller, "alpha", "beta/gateway/0", 3)
            await gamma.reply(question, _GENERATED)
            assert (await asking).message == _GENERATED

    asyncio.run(scenario())


def test_a_site_says_of_its_own_gateway_alone_that_it_has_ended() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, burglar, (controller, gamma)):
            asking = asyncio.create_task(controller.request(GAMMA, _GENERATE, **_STEP))
            question = await gamma.receive(20)
            ended = wire.GatewayEnded(site="gamma")
            await burglar.say(ended, source="beta/gateway/0")
            await burglar.say(ended, "alpha/gateway/0", source="beta/gateway/0")
            await counted(controller, "alpha", "beta/gateway/0", 1)
            await counted(controller, "alpha", "beta", 1)
            await gamma.reply(question, _GENERATED)
            assert (await asking).message == _GENERATED

    asyncio.run(scenario())


def test_nobody_but_the_controller_ends_the_run_and_nobody_but_the_trainer_sends_weights() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, TRAINER, GAMMA) as (run, burglar, (controller, _, gamma)):
            to_gamma = Burglar(run, "gamma")
            try:
                await burglar.say(wire.Abort(cause="x"))
                await burglar.say(wire.Abort(cause="x"), TRAINER)
                await to_gamma.say(wire.Abort(cause="x"), GAMMA)
                await to_gamma.say(wire.WeightsBegin(version=99, encoding="full"), GAMMA)
                await to_gamma.say(wire.Finish(), GAMMA)
                await counted(controller, "gamma", BETA, 3)
                await counted(controller, "alpha", BETA, 2)
            finally:
                to_gamma.close()
            await served(controller, gamma)
            await controller.send(GAMMA, wire.Abort(cause="over"))
            with pytest.raises(RunAborted):
                await gamma.receive(20)

    asyncio.run(scenario())


def test_a_member_of_another_site_cannot_be_invented() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER) as (_, burglar, (controller,)):
            await burglar.say(wire.Abort(cause="x"), source="beta/controller/0")
            await burglar.say(wire.WeightsBegin(version=1, encoding="full"), source="beta/actor_training/0")
            await counted(controller, "alpha", "beta", 2)
            assert not controller.offences

    asyncio.run(scenario())


def test_what_is_for_nobody_takes_no_memory_and_no_place_of_an_honest_member() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER) as (run, burglar, (controller,)):
            before = psutil.Process().memory_info().rss
            piece = bytes(MIB)
            for number in range(400):
                header = wire.Header(run="run", source=BETA, to=(f"alpha/invented/{number}",), id=number)
                await burglar.send([*wire.encode(header, wire.Done()), piece])
            await counted(controller, "alpha", "beta", MOST_OFFENCES)
            assert psutil.Process().memory_info().rss - before < 200 * MIB
            assert set(run.gateways["alpha"]._delivery.seats) == {CONTROLLER}
            async with run.member(TRAINER) as late:
                await late.send(CONTROLLER, wire.Heartbeat())
                assert (await controller.receive(20)).header.source == TRAINER

    asyncio.run(scenario())


def _chunk(number: int, source: str, sizes: tuple[int, ...] = ()) -> wire.Header:
    place = wire.Place(stream=1, sequence=number)
    return wire.Header(
        run="run",
        source=source,
        to=(CONTROLLER,),
        id=7,
        incarnation=3,
        priority=wire.Priority.DATA,
        places=(place,),
        sizes=sizes,
    )


def _early_chunks(sources: int) -> Iterator[wire.Header]:
    """Chunks that can never be put together, since the first one does not come."""
    for source in range(sources):
        for number in range(1, 100):
            yield _chunk(number, f"beta/invented/{source}")


def test_early_chunks_of_invented_members_are_not_kept() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER) as (_, burglar, (controller,)):
            before, piece = psutil.Process().memory_info().rss, bytes(MIB)
            for header in _early_chunks(4):
                await burglar.send([wire.encode_struct(header), piece])
            await counted(controller, "alpha", "beta", MOST_OFFENCES)
            assert psutil.Process().memory_info().rss - before < 200 * MIB

    asyncio.run(scenario())


def test_a_member_keeps_no_more_of_another_than_a_window_whatever_that_one_sends() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, TRAINER) as (_, burglar, (controller, _)):
            process, piece = psutil.Process(), bytes(MIB - 1000)
            before = process.memory_info().rss
            for _ in range(300):
                await burglar.say(wire.Failed(cause="x"), TRAINER, buffers=[piece])
            await counted(controller, "alpha", BETA, MOST_OFFENCES)
            await until(lambda: process.memory_info().rss - before < 150 * MIB)  # the burglar's own queue is here, too

    asyncio.run(scenario())


def test_a_replica_says_nothing_larger_than_its_window() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, TRAINER) as (_, burglar, (controller, _)):
            before = psutil.Process().memory_info().rss
            await burglar.send([wire.encode_struct(_chunk(0, BETA, (8, exchange.WINDOW_BYTES))), b"x" * 8])
            await counted(controller, "alpha", BETA, 1)
            assert psutil.Process().memory_info().rss - before < 50 * MIB

    asyncio.run(scenario())


def test_small_messages_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_WAITING", 100)

    async def scenario() -> None:
        async with broken_into(CONTROLLER, TRAINER) as (_, burglar, (controller, trainer)):
            for _ in range(150):
                await burglar.say(wire.Failed(cause="x"), TRAINER)
            await counted(controller, "alpha", BETA, MOST_OFFENCES)
            assert trainer._mailbox._inbox.qsize() <= 101

    asyncio.run(scenario())


def test_what_has_a_window_does_not_travel_outside_the_channels() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER) as (_, burglar, (controller,)):
            header = wire.Header(run="run", source=BETA, to=(CONTROLLER,), id=1)
            await burglar.send(wire.encode(header, wire.Failed(cause="x")))
            await counted(controller, "alpha", BETA, 1)

    asyncio.run(scenario())


def test_a_message_that_announces_what_no_message_has_costs_nothing() -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER, GAMMA) as (_, burglar, (controller, gamma)):
            before = psutil.Process().memory_info().rss
            for number, sizes in enumerate(((2**62,), (2**30,), (1,) * 50_000, (8, -8))):
                await burglar.send([wire.encode_struct(_chunk(number, BETA, sizes)), b"x"])
            await counted(controller, "alpha", BETA, 4)
            assert psutil.Process().memory_info().rss - before < 100 * MIB
            await served(controller, gamma)

    asyncio.run(scenario())


def test_a_log_has_one_line_for_each_of_the_first_offences_and_nothing_that_a_terminal_obeys(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with broken_into(CONTROLLER) as (_, burglar, (controller,)):
            for _ in range(200):
                await burglar.say(wire.Done(), source="beta/x\n2026-01-01 ERROR all is lost\x1b[2J/0")
            await counted(controller, "alpha", "beta", MOST_OFFENCES)

    asyncio.run(scenario())
    said = [message for message in caplog.messages if "all is lost" in message]
    assert 0 < len(said) <= MOST_OFFENCES + 1
    assert all(message.isprintable() for message in said)
