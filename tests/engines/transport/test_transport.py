"""What members may rely on when gateways die, links are cut and frames get lost; and that strangers harm nobody."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.gateway import peer_link, seat
from hetrl.runtime.gateway.peer_link import STREAMS
from hetrl.runtime.transport import exchange, farewell, member as transport_member
from hetrl.runtime.transport.member import DeadlineError, Envelope, Member
from hetrl.runtime.transport.offences import MOST_OFFENCES
from hetrl.runtime.transport.sockets import Port
from hetrl.runtime.wire.keys import make_run_keys, write_keys
from tests.engines.transport.transport_runs import (
    BETA,
    BETA_1,
    CONTROLLER,
    MEMBERS,
    TRAINER,
    Anything,
    Cable,
    Run,
    answer,
    bare_socket,
    cabled,
    free_endpoint,
    hasten,
    members,
    port_of,
    running,
    stats,
    until,
)

_STEP = {"timeout_seconds": 30.0, "doing": "step 12"}


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)


async def _stream(source: Member, to: str | Sequence[str], count: int, size_bytes: int) -> None:
    """Send numbered messages of all three priorities."""
    for number in range(count):
        fill = bytes([number % 251]) * size_bytes
        await source.send(to, wire.WeightsBegin(version=number, encoding="full"), [fill])
        await source.send(to, wire.Score(step=number, what="logprobs", arrays=()), [fill[: size_bytes // 4]])
        await source.send(to, wire.Saved(step=number, directory="d", seconds=0.0, whole=True))


async def _take(member: Member, count: int, taken: Callable[[int], Awaitable[None]] | None = None) -> None:
    """Receive what `_stream` sent: everything, once, in order and as it was; `taken` hears of each message."""
    arrived: dict[type, list[Envelope]] = {wire.WeightsBegin: [], wire.Score: [], wire.Saved: []}
    for number in range(3 * count):
        envelope = await member.receive(60)
        arrived[type(envelope.message)].append(envelope)
        if taken is not None:
            await taken(number)
    assert [envelope.message.version for envelope in arrived[wire.WeightsBegin]] == list(range(count))
    for kind in (wire.Score, wire.Saved):
        assert [envelope.message.step for envelope in arrived[kind]] == list(range(count))
    for kind in (wire.WeightsBegin, wire.Score):
        assert all(set(envelope.buffers[0]) == {number % 251} for number, envelope in enumerate(arrived[kind]))


# ---- loss


class _Faults:
    """Replaces the wire of every link: frames are lost, doubled or held back behind later ones, by a seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._random = random.Random(seed)
        self._send = Port.send
        self._held: dict[Port, list[Sequence[Any]]] = {}
        self._links: set[int] = set()
        monkeypatch.setattr(peer_link, "Port", self._port)
        monkeypatch.setattr(Port, "send", lambda port, frames: self._faulty(port, frames))

    def _port(self, *arguments: Any, **keywords: Any) -> Port:
        port = Port(*arguments, **keywords)
        self._links.add(id(port))
        return port

    def _faulty(self, port: Port, frames: Sequence[Any]) -> bool:
        if id(port) not in self._links:
            return self._send(port, frames)
        chance = self._random.random()
        if chance < 0.1:
            return True
        if chance < 0.2:
            self._held.setdefault(port, []).append(frames)
            return True
        sent = self._send(port, frames)
        if sent and chance < 0.3:
            self._send(port, frames)
        if sent and chance > 0.6 and self._held.get(port):
            self._send(port, self._held[port].pop(0))
        return sent


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("seed", range(3))
def test_everything_arrives_once_and_in_order_over_a_faulty_link(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _Faults(seed, monkeypatch)

    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, TRAINER, BETA, BETA_1) as (trainer, one, other):
            await asyncio.gather(_stream(trainer, (BETA, BETA_1), 10, 600_000), _take(one, 10), _take(other, 10))
            asking = asyncio.create_task(answer(one, wire.Done(), 10))
            for _ in range(10):
                await trainer.request(BETA, wire.Finish(), **_STEP)
            await asking
            assert trainer._exchange.chunks_resent > 0

    asyncio.run(scenario())


def test_what_a_member_says_last_is_said_again_when_it_got_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As is the word that lets others out of a barrier, however long an answer took until then."""

    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            async with run.member(TRAINER) as trainer:
                monkeypatch.setattr(trainer._connection, "send", lambda *_: monkeypatch.undo())
                await trainer.send(CONTROLLER, wire.Done())
                (channel,) = trainer._exchange._outbound.values()
                channel._stall_seconds = 600.0
            assert (await controller.receive(20)).message == wire.Done()

    asyncio.run(scenario())


def test_who_leaves_does_not_wait_for_ever_for_one_who_hears_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(farewell, "FAREWELL_SECONDS", 0.5)

    async def scenario() -> None:
        async with running("alpha") as run, run.member(TRAINER) as trainer:
            await trainer.send(CONTROLLER, wire.Done())

    asyncio.run(scenario())
    assert f"{TRAINER} leaves; what it said last was not acknowledged by {CONTROLLER}" in caplog.text


def test_who_leaves_does_not_wait_for_those_whom_it_has_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a run that is finished and has lost a replica; it may come back and is told."""
    monkeypatch.setattr(farewell, "FAREWELL_SECONDS", 600.0)  # longer than a test may take

    async def scenario() -> None:
        async with running("alpha") as run:
            async with run.member(TRAINER) as trainer:
                await trainer.send(CONTROLLER, done := wire.Done())
                trainer.abandon(CONTROLLER, wire.priority_of(done), "it was lost")
            async with run.member(CONTROLLER) as controller:
                assert (await controller.receive(20)).message == done

    asyncio.run(scenario())
    assert "leaves" not in caplog.text


def test_nobody_waits_for_what_lies_behind_a_gateway_that_has_ended_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the last word of a site's probe or job is not, where it got lost as that site's gateway ended."""
    monkeypatch.setattr(farewell, "FAREWELL_SECONDS", 600.0)  # longer than a test may take

    async def scenario() -> None:
        async with running() as run:
            async with members(run, CONTROLLER, TRAINER) as (controller, trainer):
                asking = asyncio.create_task(trainer.request(BETA, wire.Finish(), **_STEP))
                await controller.send(BETA, wire.Done())
                await until(lambda: run.is_up("alpha", "beta") and run.is_up("beta", "alpha"))
                await run.stop("beta", for_good=True)
                with pytest.raises(HetrlError, match="beta/.* cannot be reached .*: the gateway of beta has ended"):
                    await asking
            run.start("beta")
            await until(lambda: run.gateways["alpha"]._delivery.links["beta"].gone is None)
            async with members(run, CONTROLLER, BETA) as (controller, rollout):
                await controller.send(BETA, wire.Done())
                assert (await rollout.receive(20)).message == wire.Done()

    asyncio.run(scenario())
    assert "leaves" not in caplog.text


# ---- gateways that die


@asynccontextmanager
async def _processes(folder: Path) -> AsyncIterator[tuple[dict[str, str], dict[str, subprocess.Popen[bytes]], Any]]:
    """Two gateways as processes; yields their endpoints, the processes and how to start one."""
    sites = ("alpha", "beta")
    endpoints = {site: free_endpoint() for site in sites}
    keys = make_run_keys(sites)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for site in sites:
        write_keys(folder / f"{site}.key", keys[site])
        (other,) = set(sites) - {site}
        links = {other: {"way": "direct", "endpoint": endpoints[other], "streams": 2}}
        raw = {"run": "run", "site": site, "bind": endpoints[site], "links": links, "hold_seconds": 60}
        raw["members"] = [*MEMBERS]
        (folder / f"{site}.json").write_text(json.dumps({**raw, "keys": str(folder / f"{site}.key")}))

    def start(site: str) -> None:
        argv = [sys.executable, "-m", "hetrl.runtime.gateway.gateway_process", "--member", str(folder / f"{site}.json")]
        processes[site] = subprocess.Popen(argv, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[3])

    try:
        for site in sites:
            start(site)
        yield endpoints, processes, (keys, start)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_a_gateway_that_is_killed_and_comes_back_costs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            endpoints, processes, (keys, start) = await stack.enter_async_context(_processes(tmp_path))
            trainer, rollout = [
                await stack.enter_async_context(
                    Member(address, "run", endpoints[site], keys[site], authority=Anything())
                )
                for address, site in ((TRAINER, "alpha"), (BETA, "beta"))
            ]

            async def kill(number: int) -> None:
                for site, when in (("beta", 30), ("alpha", 60)):
                    if number == when:
                        processes[site].send_signal(signal.SIGKILL)
                        processes[site].wait()
                        start(site)

            await asyncio.gather(_stream(trainer, BETA, 40, 3_000_000), _take(rollout, 40, kill))
            assert trainer._exchange.chunks_resent > 0

    asyncio.run(scenario())


async def _taken_and_left(run: Run, controller: Member) -> asyncio.Task[Envelope]:
    """Let a trainer take a request and end without an answer; return the request."""
    async with run.member(TRAINER) as trainer:
        asking = asyncio.create_task(controller.request(TRAINER, wire.Finish(), **_STEP))
        await trainer.receive(20)
    return asking


def test_a_receiver_that_restarts_ends_what_was_under_way_to_it() -> None:
    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            asking = await _taken_and_left(run, controller)
            async with run.member(TRAINER) as trainer:
                await trainer.send(CONTROLLER, wire.Done())
                with pytest.raises(HetrlError, match=f"{TRAINER} cannot be reached .step 12.: {TRAINER} restarted"):
                    await asking

    asyncio.run(scenario())


def test_one_that_restarts_in_silence_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its life before took the request, and the next one knows nothing of it."""
    monkeypatch.setattr(transport_member, "ASK_AFTER_SECONDS", 0.5)

    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            asking = await _taken_and_left(run, controller)
            async with run.member(TRAINER):
                with pytest.raises(HetrlError, match=f"{TRAINER} cannot be reached .step 12.: {TRAINER} restarted"):
                    await asking

    asyncio.run(scenario())


def test_one_that_takes_a_request_and_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_member, "ASK_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(seat, "RECONNECT_SECONDS", 1.0)

    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            asking = await _taken_and_left(run, controller)
            with pytest.raises(HetrlError, match=f"{TRAINER} cannot be reached .*not been connected for 1 s"):
                await asking

    asyncio.run(scenario())


def test_who_waits_for_a_member_that_is_cut_off_is_told() -> None:
    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER, TRAINER) as (controller, trainer):
            asking = asyncio.create_task(controller.request(TRAINER, wire.Finish(), **_STEP))
            await trainer.receive(20)
            for _ in range(MOST_OFFENCES):
                controller.offended(TRAINER, "an answer that nobody asked for")
            with pytest.raises(HetrlError, match=f"cut {TRAINER} off after 8 messages .*: an answer that nobody"):
                await asking

    asyncio.run(scenario())


# ---- connections that lead nowhere


@asynccontextmanager
async def _without_peer() -> AsyncIterator[tuple[Run, Cable]]:
    """Alpha, and a way to beta that takes connections and ends them, since no gateway is there."""
    async with AsyncExitStack() as stack:
        cable = await stack.enter_async_context(Cable().carrying())
        run = await stack.enter_async_context(running("alpha", ways={("alpha", "beta"): cable.endpoint}))
        cable.target = run.endpoints["beta"]
        yield run, cable


def test_a_way_without_a_gateway_at_its_end_is_tried_on_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_link, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(peer_link, "LONGEST_PAUSE_SECONDS", 0.02)
    said = "connections end before the other gateway answers"

    async def scenario() -> None:
        async with _without_peer() as (run, cable), members(run, CONTROLLER, BETA) as (controller, rollout):
            await controller.send(BETA, wire.Finish())
            await until(lambda: cable.accepted > 30)
            run.start("beta")
            assert (await rollout.receive(20)).message == wire.Finish()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    told = [record.getMessage() for record in caplog.records if said in record.getMessage()]
    assert sorted(told) == sorted(set(told))
    assert {message.split(":")[0] for message in told} == {
        f"alpha -> beta stream {number}" for number in range(1 + STREAMS)
    }


def test_a_way_without_a_gateway_at_its_end_is_left_in_peace_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "FIRST_PAUSE_SECONDS", 3600.0)

    async def scenario() -> None:
        async with _without_peer() as (_, cable):
            await until(lambda: cable.accepted == 1 + STREAMS)
            await asyncio.sleep(1.0)  # ZeroMQ would try again within 0.2 s
            assert cable.accepted == 1 + STREAMS

    asyncio.run(scenario())


# ---- links that are cut


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize(("how", "seconds"), [("silent", 0.5), ("snapped", 0.5), ("silent", 5.0)])
def test_a_cut_that_is_mended_loses_and_doubles_nothing(how: str, seconds: float) -> None:
    async def scenario() -> None:
        async with cabled() as (run, cable, _), members(run, TRAINER, BETA) as (trainer, rollout):
            sending = asyncio.create_task(_stream(trainer, BETA, 30, 2_000_000))
            taking = asyncio.create_task(_take(rollout, 30))
            await until(lambda: run.gateways["alpha"].stats().links["beta"].bytes_sent > 4_000_000)
            cable.cut()
            if how == "snapped":
                cable.snap()
            await asyncio.sleep(seconds)
            cable.mend()
            await asyncio.gather(sending, taking)
            reconnects = (await stats(trainer, "alpha")).links["beta"].reconnects
            assert (reconnects > 0) == (how == "snapped")

    asyncio.run(scenario())


@pytest.mark.usefixtures("_hasty")
def test_connections_that_stay_open_and_carry_nothing_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "REDIAL_SECONDS", 1.0)

    async def scenario() -> None:
        async with cabled() as (run, cable, _), members(run, TRAINER, BETA) as (trainer, rollout):
            sending = asyncio.create_task(_stream(trainer, BETA, 10, 2_000_000))
            taking = asyncio.create_task(_take(rollout, 10))
            await until(lambda: run.gateways["alpha"].stats().links["beta"].bytes_sent > 4_000_000)
            cable.strand()
            await asyncio.gather(sending, taking)
            assert cable.accepted == 2 * (1 + STREAMS)

    asyncio.run(scenario())


def test_each_stream_of_a_link_says_something_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "STILL_SECONDS", 0.2)

    async def scenario() -> None:
        async with cabled() as (run, _, _):
            streams = run.gateways["alpha"]._delivery.links["beta"]._streams
            await until(lambda: all(stream.sent_seconds for stream in streams))
            first = [stream.sent_seconds for stream in streams]
            await until(lambda: all(map(float.__lt__, first, (stream.sent_seconds for stream in streams))))
            assert not run.gateways["beta"].stats().malformed

    asyncio.run(scenario())


def test_a_link_is_known_to_be_up_soon_where_the_first_answer_got_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "ECHO_SECONDS", 600.0)

    async def scenario() -> None:
        async with Cable().carrying() as cable:
            cable.cut()
            async with running("alpha", "beta", ways={("beta", "alpha"): cable.endpoint}) as run:
                cable.target = run.endpoints["alpha"]
                await until(lambda: run.gateways["beta"].stats().links["alpha"].messages_received > 0)
                assert not run.is_up("alpha", "beta")
                cable.mend()
                await until(lambda: run.is_up("alpha", "beta") and run.is_up("beta", "alpha"))

    asyncio.run(scenario())


@pytest.mark.usefixtures("_hasty")
def test_while_a_link_is_out_members_know_and_no_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "OUT_SECONDS", 0.5)

    async def scenario() -> None:
        async with cabled() as (run, cable, _), members(run, CONTROLLER, BETA) as (controller, rollout):
            seen: list[tuple[str, bool]] = []
            with controller.links.told(lambda site: seen.append((site, controller.links.are_out(BETA)))):
                asking = asyncio.create_task(
                    controller.request(BETA, wire.Finish(), timeout_seconds=3.0, doing="over an outage")
                )
                asked = await rollout.receive(20)
                cable.cut()
                await until(lambda: ("beta", True) in seen)
                await asyncio.sleep(4.0)
                async with members(run, TRAINER) as (late,):
                    await until(lambda: late.links.are_out(BETA))
                assert not asking.done()
                cable.mend()
                await until(lambda: seen[-1] == ("beta", False))
                await rollout.reply(asked, wire.Done())
                assert (await asking).message == wire.Done()

    asyncio.run(scenario())


@pytest.mark.usefixtures("_hasty")
def test_what_is_sent_over_a_link_that_was_given_up_and_is_coming_back_is_not_refused() -> None:
    async def scenario() -> None:
        async with (
            cabled(patience_seconds={"alpha": 1.0, "beta": 1.0}) as (run, cable, _),
            members(run, CONTROLLER, BETA) as (controller, rollout),
        ):
            cable.cut()
            link = run.gateways["alpha"]._delivery.links["beta"]
            await until(lambda: link.gone is not None)
            await asyncio.sleep(0.5)  # what is under way when members are told so is refused, as it was sent before
            sending = asyncio.create_task(controller.send(BETA, wire.Done()))
            await asyncio.sleep(0.5)
            assert link.gone is not None
            cable.mend()
            await sending
            while not isinstance((await rollout.receive(20)).message, wire.Done):
                continue
            with pytest.raises(DeadlineError):
                await controller.receive(0.5)  # no word that it was refused

    asyncio.run(scenario())


@pytest.mark.usefixtures("_hasty")
def test_a_cut_for_good_ends_every_wait_with_the_name_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WINDOW_BYTES", 1_000_000)
    said = "alpha -> beta: no connection for 1 s"

    async def scenario() -> None:
        async with (
            cabled(patience_seconds={"alpha": 1.0, "beta": 1.0}) as (run, cable, _),
            members(run, CONTROLLER, TRAINER, BETA) as (controller, trainer, rollout),
        ):
            answered = asyncio.create_task(controller.request(BETA, wire.Finish(), **_STEP))
            await rollout.receive(20)
            cable.cut()
            sending = asyncio.create_task(_stream(trainer, BETA, 4, 800_000))
            with pytest.raises(HetrlError, match=said):
                await answered  # it had arrived, but the answer cannot
            with pytest.raises(HetrlError, match=said):
                await controller.request(BETA, wire.Finish(), **_STEP)
            await sending
            lost = [await trainer.receive(20) for _ in range(12)]
            assert all(said in envelope.message.cause for envelope in lost)
            cable.mend()
            await until(lambda: run.gateways["alpha"]._delivery.links["beta"].gone is None)
            await trainer.send(BETA, wire.Done())
            while not isinstance((await rollout.receive(20)).message, wire.Done):
                continue

    asyncio.run(scenario())


@pytest.mark.usefixtures("_hasty")
def test_a_lane_holds_no_more_than_its_bound_and_what_it_drops_is_sent_again() -> None:
    limit = 3_000_000

    async def scenario() -> None:
        async with (
            cabled(lane_bytes=limit) as (run, cable, _),
            members(run, TRAINER, BETA) as (trainer, rollout),
        ):
            cable.cut()
            sending = asyncio.create_task(_stream(trainer, BETA, 40, 1_000_000))
            gateway = run.gateways["alpha"]
            await until(lambda: gateway.stats().links["beta"].chunks_dropped >= 5)
            # A lane for control and one for the rest.
            assert limit / 2 < gateway.stats().links["beta"].peak_queued_bytes <= 2 * limit
            cable.mend()
            await asyncio.gather(sending, _take(rollout, 40))

    asyncio.run(scenario())


@pytest.mark.usefixtures("_hasty")
def test_queues_hold_no_more_than_the_windows_of_their_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    window, count = 48_000_000, 72  # the kernel holds some 40 MB of a silent link itself
    monkeypatch.setattr(exchange, "WINDOW_BYTES", window)
    most = 2 * window * 1.01 + 100_000  # of weights and of data, with headers, and control messages

    async def scenario() -> None:
        async with (
            cabled() as (run, cable, _),
            members(run, CONTROLLER, TRAINER, BETA, BETA_1) as (controller, trainer, *rollouts),
        ):
            cable.cut()
            pairs = ((controller, BETA), (trainer, BETA_1))
            sending = [asyncio.create_task(_stream(source, to, count, 1_000_000)) for source, to in pairs]
            await until(lambda: run.gateways["alpha"].stats().links["beta"].peak_queued_bytes > window)
            cable.mend()

            async def slowly(number: int) -> None:
                await asyncio.sleep(0.01)

            await asyncio.gather(*sending, *(_take(rollout, count, slowly) for rollout in rollouts))
            assert window < (await stats(controller, "alpha")).links["beta"].peak_queued_bytes <= 2 * most
            at_members = (await stats(controller, "beta")).peak_queued_bytes
            assert max(at_members.values(), default=0) <= most

    asyncio.run(scenario())


def test_what_is_urgent_overtakes_weights_on_a_slow_link() -> None:
    count = 24

    async def scenario() -> None:
        async with cabled(bytes_per_second=8e6) as (run, _, _), members(run, TRAINER, BETA) as (trainer, rollout):
            for version in range(count):
                await trainer.send(BETA, wire.WeightsBegin(version=version, encoding="full"), [bytes(2**20)])
            await trainer.send(BETA, wire.Saved(step=1, directory="d", seconds=0.0, whole=True))
            arrived = [type((await rollout.receive(60)).message) for _ in range(count + 1)]
            assert arrived[-1] is wire.WeightsBegin

    asyncio.run(scenario())


@pytest.mark.parametrize("to", [TRAINER, BETA], ids=["member", "link"])
def test_a_full_lane_refuses_control_messages_with_an_error(to: str) -> None:
    async def scenario() -> None:
        async with running("alpha", lane_bytes=100_000) as run, members(run, CONTROLLER) as (controller,):
            failed = wire.Failed(cause="x" * 30_000)
            asking = [asyncio.create_task(controller.request(to, failed, **_STEP)) for _ in range(30)]
            for task in asking:
                with pytest.raises(HetrlError, match=r"\d+ bytes of control messages wait"):
                    await task

    asyncio.run(scenario())


# ---- strangers


def test_a_port_scan_and_silent_peers_hold_nobody_up() -> None:
    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            await stats(controller, "alpha")
            port = port_of(run.endpoints["alpha"])
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _ in range(20):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            await stats(controller, "alpha")
            for _, writer in silent:
                writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 100,
        random.Random(0).randbytes(4000),
        # A greeting of ZMTP 3.1 that asks for no security, then a frame of 2 GiB (https://rfc.zeromq.org/spec/37/).
        b"\xff"
        + bytes(8)
        + b"\x7f\x03\x01NULL"
        + bytes(16 + 1 + 31)
        + b"\x02"
        + (2**31).to_bytes(8, "big")
        + b"x" * 99,
        b"\xff"
        + bytes(8)
        + b"\x7f\x03\x01CURVE"
        + bytes(15 + 1 + 31)
        + b"\x06"
        + (2**31).to_bytes(8, "big")
        + b"x" * 99,
    ],
    ids=["http", "noise", "null", "curve"],
)
def test_who_does_not_speak_our_protocol_is_hung_up_on(said: bytes) -> None:
    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            await stats(controller, "alpha")
            await until(lambda: run.gateways["alpha"].not_admitted == 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(run.endpoints["alpha"]))
            writer.write(said)
            try:
                async with asyncio.timeout(20):
                    while await reader.read(4096):
                        continue
            except ConnectionError:
                pass
            writer.close()
            await until(lambda: run.gateways["alpha"].not_admitted == 1)
            await stats(controller, "alpha")

    asyncio.run(scenario())


def test_a_frame_larger_than_any_of_ours_ends_its_connection_and_is_not_delivered() -> None:
    async def scenario() -> None:
        async with (
            running("alpha") as run,
            members(run, CONTROLLER) as (controller,),
            bare_socket(run, run.keys["alpha"]) as bare,
        ):
            header = wire.Header(run="run", source=TRAINER, to=(CONTROLLER,), id=7)
            large = wire.encode(header, wire.Failed(cause="x" * 3_000_000))
            monitor = bare.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            bare.send_multipart(large)
            await until(lambda: monitor.poll(0) > 0)
            bare.disable_monitor()
            monitor.close(0)
            await stats(controller, "alpha")
            with pytest.raises(HetrlError, match="no message arrived"):
                await controller.receive(0.1)

    asyncio.run(scenario())


def test_a_replayed_frame_is_heard_once() -> None:
    async def scenario() -> None:
        async with (
            running("alpha") as run,
            members(run, CONTROLLER) as (controller,),
            bare_socket(run, run.keys["alpha"]) as bare,
        ):
            header = wire.Header(
                run="run",
                source=TRAINER,
                to=(CONTROLLER,),
                id=7,
                incarnation=5,
                places=(wire.Place(stream=1, sequence=0),),
                sizes=(len(wire.encode_struct(wire.Done())),),
            )
            for _ in range(3):
                bare.send_multipart(wire.encode(header, wire.Done()))
            assert (await controller.receive(20)).message == wire.Done()
            await until(lambda: controller._exchange.chunks_duplicate == 2)
            with pytest.raises(HetrlError, match="no message arrived"):
                await controller.receive(0.1)

    asyncio.run(scenario())


# ---- what members know of links


@pytest.fixture
def _quick_echoes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"OUT_SECONDS": 0.5, "ECHO_SECONDS": 0.1, "REDIAL_SECONDS": 1.0}.items():
        monkeypatch.setattr(peer_link, name, seconds)
    monkeypatch.setattr(transport_member, "HELLO_SECONDS", 0.5)


@pytest.mark.usefixtures("_quick_echoes")
def test_members_of_a_gateway_that_is_started_again_while_a_link_is_out_learn_that_it_is_back() -> None:
    async def scenario() -> None:
        async with cabled() as (run, cable, _), members(run, CONTROLLER, BETA) as (controller, rollout):
            await until(lambda: run.is_up("beta", "alpha"))
            cable.cut()
            await until(lambda: controller.links.are_out(BETA))
            await run.stop("alpha")
            run.start("alpha")
            cable.mend()
            await controller.send(BETA, wire.Done())
            assert isinstance((await rollout.receive(20)).message, wire.Done)
            await until(lambda: not controller.links.are_out(BETA))

    asyncio.run(scenario())


@pytest.mark.usefixtures("_quick_echoes")
def test_a_member_that_is_started_again_while_a_link_is_out_is_told() -> None:
    async def scenario() -> None:
        async with cabled() as (run, cable, _):
            async with members(run, CONTROLLER) as (first,):
                cable.cut()
                await until(lambda: first.links.are_out(BETA))
            async with members(run, CONTROLLER) as (second,):
                await until(lambda: second.links.are_out(BETA))
                cable.mend()
                await until(lambda: not second.links.are_out(BETA))

    asyncio.run(scenario())


@pytest.mark.usefixtures("_quick_echoes")
def test_a_link_that_carries_one_way_alone_is_given_up_after_its_patience() -> None:
    async def scenario() -> None:
        patience = {"alpha": 3.0, "beta": 3.0}
        async with cabled(patience_seconds=patience) as (run, _, back), members(run, CONTROLLER) as (controller,):
            await until(lambda: run.is_up("beta", "alpha"))
            out = list[bool]()
            with controller.links.told(lambda _: out.append(controller.links.are_out(BETA))):
                back.cut()
                await until(lambda: controller.links.why_given_up(BETA) is not None)
            assert out == [True, True], "out, then given up; it never counts as back in between"

    asyncio.run(scenario())


@pytest.mark.usefixtures("_quick_echoes")
def test_a_gateway_that_ends_for_good_while_the_link_is_out_is_waited_for_no_more() -> None:
    async def scenario() -> None:
        async with cabled() as (run, cable, _), members(run, CONTROLLER) as (controller,):
            await until(lambda: run.is_up("beta", "alpha"))
            cable.cut()
            await until(lambda: controller.links.are_out(BETA))
            await run.stop("beta", for_good=True)
            await until(lambda: controller.links.why_given_up(BETA) is not None)

    asyncio.run(scenario())


def test_a_cause_that_somebody_gives_is_fit_for_a_terminal() -> None:
    async def scenario() -> None:
        async with running() as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            asked = asyncio.create_task(controller.request(BETA, wire.Finish(), **_STEP))
            envelope = await rollout.receive(20)
            await rollout.reply(
                envelope, wire.Failed(cause="\x1b]0;owned\x1b[2J" + 9_000 * "x" + "\nall is well\n" * 999)
            )
            with pytest.raises(HetrlError) as caught:
                await asked
            said = str(caught.value)
            assert "\x1b" not in said and len(said) < 9_000
            assert "\nall is well\n" in said

    asyncio.run(scenario())
