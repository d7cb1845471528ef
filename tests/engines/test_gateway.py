"""Gateways and members over real CURVE sockets on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from hetrl.errors import HetrlError
from hetrl.runtime import lane, wire
from hetrl.runtime import member as member_module
from hetrl.runtime.gateway import Gateway
from hetrl.runtime.keys import SiteKeys, make_run_keys, write_keys
from hetrl.runtime.member import DeadlineError, Member, RunAborted
from hetrl.runtime.sockets import client_socket

_SITES = ("alpha", "beta", "gamma")
_CONTROLLER, _TRAINER = "alpha/controller/0", "alpha/actor_training/0"
_BETA, _BETA_1, _GAMMA = "beta/actor_generation/0", "beta/actor_generation/1", "gamma/actor_generation/2"
_STEP = {"timeout_seconds": 20.0, "doing": "step 12: generate group 3"}
_PUBLISHED = wire.Published(version=3, digest="d", bytes=1, seconds=0.5, apply_seconds={_GAMMA: 1.0})


def _free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class _Run:
    """Three sites on loopback: keys, endpoints and the gateways that were started."""

    def __init__(self, hold_seconds: float) -> None:
        self.keys = make_run_keys(_SITES)
        self.endpoints = {site: _free_endpoint() for site in _SITES}
        self.gateways: dict[str, Gateway] = {}
        self._hold_seconds = hold_seconds
        self._serving: dict[str, asyncio.Task[None]] = {}

    def start(self, site: str) -> Gateway:
        gateway = Gateway(
            site, "run", self.endpoints[site], self.endpoints, self.keys[site], hold_seconds=self._hold_seconds
        )
        self.gateways[site] = gateway
        self._serving[site] = asyncio.create_task(gateway.serve())
        return gateway

    async def stop(self, site: str) -> None:
        self.gateways[site].stop()
        await self._serving.pop(site)

    async def stop_all(self) -> None:
        await asyncio.gather(*(self.stop(site) for site in list(self._serving)))

    def member(self, address: str) -> Member:
        site = wire.site_of(address)
        return Member(address, "run", self.endpoints[site], self.keys[site])


@asynccontextmanager
async def _run(*sites: str, hold_seconds: float = 20.0) -> AsyncIterator[_Run]:
    run = _Run(hold_seconds)
    for site in sites or _SITES:
        run.start(site)
    try:
        yield run
    finally:
        await run.stop_all()


@asynccontextmanager
async def _members(run: _Run, *addresses: str) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run.member(address)) for address in addresses]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def _answer(member: Member, message: wire.Message, times: int = 1) -> None:
    for _ in range(times):
        await member.reply(await member.receive(20), message)


def test_a_request_crosses_two_sites_and_its_reply_comes_back() -> None:
    async def scenario() -> None:
        async with _run() as run, _members(run, _CONTROLLER, _BETA) as (controller, rollout):
            answering = asyncio.create_task(_answer(rollout, _PUBLISHED))
            reply = await controller.request(_BETA, wire.Publish(version=3, receivers=(_GAMMA,)), **_STEP)
            await answering
            assert reply.message == _PUBLISHED
            assert reply.header.source == _BETA

    asyncio.run(scenario())


def test_concurrent_requests_get_their_own_replies() -> None:
    async def scenario() -> None:
        async with _run("alpha") as run, _members(run, _CONTROLLER, _TRAINER) as (controller, trainer):
            asking = [
                asyncio.create_task(controller.request(_TRAINER, wire.Publish(version=version, receivers=()), **_STEP))
                for version in range(20)
            ]
            requests = [await trainer.receive(20) for _ in asking]
            for request in reversed(requests):
                await trainer.reply(request, wire.WeightsRejected(version=request.message.version, cause=""))
            assert [(await task).message.version for task in asking] == list(range(20))

    asyncio.run(scenario())


def test_multicast_crosses_each_link_once() -> None:
    piece = b"w" * 300_000

    async def scenario() -> None:
        async with (
            _run() as run,
            _members(run, _CONTROLLER, _TRAINER, _BETA, _BETA_1, _GAMMA) as (controller, trainer, *rollouts),
        ):
            await trainer.send((_BETA, _GAMMA, _BETA_1), wire.WeightsBegin(version=1, encoding="full"), [piece])
            for rollout in rollouts:
                assert bytes((await rollout.receive(20)).buffers[0]) == piece
            at = {site: await _stats(controller, site) for site in _SITES}
            for site in ("beta", "gamma"):
                link = at["alpha"].links[site]
                assert link.messages_sent == 1
                assert len(piece) < link.bytes_sent < len(piece) + 2_000
                assert len(piece) < at[site].links["alpha"].bytes_received < len(piece) + 2_000
            assert at["beta"].links["gamma"] == wire.LinkCounters()

    asyncio.run(scenario())


async def _stats(member: Member, site: str) -> wire.LinkStatsReply:
    reply = await member.request(f"{site}/gateway/0", wire.LinkStats(), timeout_seconds=20, doing="counters")
    assert isinstance(reply.message, wire.LinkStatsReply)
    return reply.message


def test_large_buffers_arrive_byte_identical() -> None:
    blob = hashlib.shake_128(b"seed").digest(20_000_000)

    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _TRAINER, _BETA) as (trainer, rollout):
            for buffers in ([blob], [blob[:3], b"", memoryview(blob)[5:]]):
                await trainer.send(_BETA, wire.Done(), buffers)
                assert [bytes(buffer) for buffer in (await rollout.receive(20)).buffers] == [bytes(b) for b in buffers]

    asyncio.run(scenario())


def test_a_sender_waits_for_a_receiver_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "WINDOW_BYTES", 1_000_000)
    piece = b"p" * 400_000

    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _TRAINER, _BETA) as (trainer, rollout):
            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for version in range(6):
                    await trainer.send(_BETA, wire.WeightsBegin(version=version, encoding="full"), [piece])
                    sent += 1

            sending = asyncio.create_task(send_all())
            await _until(lambda: sent == 2)
            # What has no buffers does not wait.
            await trainer.request("beta/gateway/0", wire.LinkStats(), timeout_seconds=20, doing="counters")
            assert sent == 2
            assert [(await rollout.receive(20)).message.version for _ in range(6)] == list(range(6))
            await sending

    asyncio.run(scenario())


def test_two_sites_that_flood_each_other_both_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "WINDOW_BYTES", 2_000_000)

    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _TRAINER, _BETA) as (trainer, rollout):

            async def flood(source: Member, to: str) -> None:
                for _ in range(40):
                    await source.send(to, wire.Done(), [b"f" * 1_000_000])

            async def take(member: Member) -> int:
                return sum([len((await member.receive(20)).buffers[0]) for _ in range(40)])

            *_, there, here = await asyncio.gather(
                flood(trainer, _BETA), flood(rollout, _TRAINER), take(rollout), take(trainer)
            )
            assert (there, here) == (40_000_000, 40_000_000)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("alpha/critic_training/0", "alpha: alpha/critic_training/0 cannot be reached"),
        ("beta/reward/7", "beta: beta/reward/7 cannot be reached"),
        ("delta/reward/0", "delta is not a site of this run"),
        (_GAMMA, "gamma has not been connected for 0.3 s"),
    ],
)
def test_a_receiver_that_is_not_there_is_named(to: str, said: str) -> None:
    async def scenario() -> None:
        async with _run("alpha", "beta", hold_seconds=0.3) as run, _members(run, _CONTROLLER) as (controller,):
            await _until(lambda: "beta" in run.gateways["alpha"]._up)
            with pytest.raises(HetrlError, match=said) as error:
                await controller.request(to, wire.Finish(), [b"x"], **_STEP)
            assert "step 12: generate group 3" in str(error.value)

    asyncio.run(scenario())


def test_a_plain_send_to_nobody_comes_back_undeliverable() -> None:
    async def scenario() -> None:
        async with _run("alpha", hold_seconds=0.1) as run, _members(run, _CONTROLLER) as (controller,):
            sent = await controller.send(_TRAINER, wire.Finish())
            envelope = await controller.receive(20)
            assert isinstance(envelope.message, wire.Undeliverable)
            assert (envelope.message.receiver, envelope.header.reply_to) == (_TRAINER, sent)

    asyncio.run(scenario())


def test_a_deadline_names_peer_site_and_purpose() -> None:
    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _CONTROLLER, _BETA) as (controller, rollout):
            with pytest.raises(
                DeadlineError, match=f"beta: {_BETA} did not answer {_CONTROLLER} within 0.2 s .step 12"
            ):
                await controller.request(_BETA, wire.Finish(), timeout_seconds=0.2, doing="step 12: generate group 3")
            with pytest.raises(DeadlineError, match=f"{_CONTROLLER}: no message arrived within 0.1 s"):
                await controller.receive(0.1)
            # The answer that comes too late disturbs nobody.
            await _answer(rollout, wire.Done())
            answering = asyncio.create_task(_answer(rollout, wire.Done()))
            await controller.request(_BETA, wire.Finish(), **_STEP)
            await answering

    asyncio.run(scenario())


def test_a_failed_peer_is_named_with_its_cause() -> None:
    async def scenario() -> None:
        async with _run("alpha") as run, _members(run, _CONTROLLER, _TRAINER) as (controller, trainer):
            answering = asyncio.create_task(_answer(trainer, wire.Failed(cause="out of memory")))
            with pytest.raises(HetrlError, match=f"{_TRAINER} failed .step 12: generate group 3.: out of memory"):
                await controller.request(_TRAINER, wire.Finish(), **_STEP)
            await answering

    asyncio.run(scenario())


def test_an_abort_reaches_whoever_waits() -> None:
    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _CONTROLLER, _BETA) as (controller, rollout):
            requesting = asyncio.create_task(rollout.request(_CONTROLLER, wire.Done(), **_STEP))
            receiving = asyncio.create_task(rollout.receive())
            await controller.receive(20)
            await controller.send(_BETA, wire.Abort(cause="beta: node 3 is gone; resume the run"))
            for waiting in (requesting, receiving, rollout.receive(), rollout.send(_CONTROLLER, wire.Done())):
                with pytest.raises(RunAborted, match=f"{_CONTROLLER} ended the run: beta: node 3 is gone"):
                    await waiting

    asyncio.run(scenario())


def test_members_may_start_before_their_gateway() -> None:
    async def scenario() -> None:
        async with _run("beta") as run, _members(run, _CONTROLLER, _BETA) as (controller, rollout):
            join = wire.Join(ranks=1, host="h", pid=1, engines={"vllm": "0"})
            await rollout.send(_CONTROLLER, join)
            requesting = asyncio.create_task(controller.request(_BETA, wire.Finish(), **_STEP))
            run.start("alpha")
            assert (await controller.receive(20)).message == join
            await _answer(rollout, wire.Done())
            assert (await requesting).message == wire.Done()

    asyncio.run(scenario())


def test_members_and_sites_find_a_gateway_again() -> None:
    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _CONTROLLER, _BETA) as (controller, rollout):
            for _ in range(2):
                answering = asyncio.create_task(_answer(rollout, wire.Done()))
                await controller.request(_BETA, wire.Finish(), **_STEP)
                await answering
                await run.stop("beta")
                await _until(lambda: "beta" not in run.gateways["alpha"]._up)
                run.start("beta")

    asyncio.run(scenario())


def test_a_member_that_comes_back_gets_what_is_sent_to_its_address() -> None:
    async def scenario() -> None:
        async with _run("alpha") as run, _members(run, _CONTROLLER) as (controller,):
            for _ in range(3):
                async with run.member(_TRAINER) as trainer:
                    answering = asyncio.create_task(_answer(trainer, wire.Done()))
                    await trainer.send(_CONTROLLER, wire.Heartbeat())
                    await controller.receive(20)
                    await _until(lambda: _TRAINER in run.gateways["alpha"]._members)
                    await controller.request(_TRAINER, wire.Finish(), **_STEP)
                    await answering

    asyncio.run(scenario())


def test_a_request_to_a_member_that_is_lost_ends_without_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane, "RECONNECT_SECONDS", 0.2)

    async def scenario() -> None:
        async with _run("alpha", hold_seconds=1000) as run, _members(run, _CONTROLLER) as (controller,):
            async with run.member(_TRAINER):
                await _until(lambda: _TRAINER in run.gateways["alpha"]._members)
            with pytest.raises(HetrlError, match=f"{_TRAINER} has not been connected for 0.2 s"):
                await controller.request(_TRAINER, wire.Finish(), **_STEP)

    asyncio.run(scenario())


def test_a_gateway_that_stops_sends_what_it_holds() -> None:
    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _TRAINER, _BETA) as (trainer, rollout):
            await _until(lambda: "beta" in run.gateways["alpha"]._up)
            await trainer.send(_BETA, wire.Done(), [b"l" * 40_000_000])
            await _until(lambda: "beta" in run.gateways["alpha"]._lanes)
            await run.stop("alpha")
            assert len((await rollout.receive(20)).buffers[0]) == 40_000_000

    asyncio.run(scenario())


def test_heartbeats_arrive_until_the_member_closes() -> None:
    async def scenario() -> None:
        async with _run("alpha", "beta") as run, _members(run, _CONTROLLER) as (controller,):
            async with run.member(_BETA) as rollout:
                rollout.start_heartbeat(_CONTROLLER, every_seconds=0.01)
                arrived = [await controller.receive(20) for _ in range(3)]
            assert {(envelope.header.source, type(envelope.message)) for envelope in arrived} == {
                (_BETA, wire.Heartbeat)
            }

    asyncio.run(scenario())


def test_a_stranger_gets_nothing_and_is_counted() -> None:
    stranger_keys = make_run_keys(_SITES)

    async def scenario() -> None:
        async with _run("alpha") as run, _members(run, _CONTROLLER) as (controller,):
            ours = run.keys["alpha"]
            async with _connected(run, stranger_keys["alpha"], ours.public) as stranger:
                await stranger.send_multipart(_frames("alpha/critic_training/0", _CONTROLLER, wire.Abort(cause="x")))
                await _until(lambda: run.gateways["alpha"].refused > 0)
            with pytest.raises(DeadlineError):
                await controller.receive(0.2)
            stats = await _stats(controller, "alpha")
            assert stats.refused == run.gateways["alpha"].refused
            assert stats.malformed == 0  # nothing of it came through

    asyncio.run(scenario())


@asynccontextmanager
async def _connected(run: _Run, keys: SiteKeys, server_key: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A bare socket to the gateway of alpha."""
    context = zmq.asyncio.Context()
    bare = client_socket(context, keys, server_key)
    bare.connect(run.endpoints["alpha"])
    try:
        yield bare
    finally:
        bare.close(linger=0)
        context.term()


def _frames(source: str, to: str, message: wire.Message, run: str = "run") -> list[bytes]:
    return wire.encode(wire.Header(run=run, source=source, to=(to,), id=7), message)


def test_garbage_is_dropped_and_counted() -> None:
    garbage = [
        [b""],
        [b"\xc1", b"\xff"],
        _frames(_TRAINER, _CONTROLLER, wire.Done())[:1],
        [_frames(_TRAINER, "alpha/gateway/0", wire.Done())[0], b"\xc1"],
        _frames(_TRAINER, _CONTROLLER, wire.Done(), run="other"),
        _frames(_BETA, _CONTROLLER, wire.Abort(cause="with the key of another site")),
        wire.encode(wire.Header(run="run", source=_TRAINER, to=(), id=1), wire.Done()),
    ]

    async def scenario() -> None:
        async with _run("alpha") as run, _members(run, _CONTROLLER) as (controller,):
            async with _connected(run, run.keys["alpha"], run.keys["alpha"].public) as bare:
                for frames in garbage:
                    await bare.send_multipart(frames)
                # What a gateway cannot judge, the receiver drops.
                await bare.send_multipart([_frames(_TRAINER, _CONTROLLER, wire.Done())[0], b"\xc1"])
                await bare.send_multipart(_frames(_TRAINER, _CONTROLLER, wire.Done()))
                assert (await controller.receive(20)).message == wire.Done()
            assert (await _stats(controller, "alpha")).malformed == len(garbage)
            assert controller.malformed == 1

    asyncio.run(scenario())


def test_bytes_that_are_not_zeromq_do_not_disturb_a_gateway() -> None:
    async def scenario() -> None:
        async with _run("alpha") as run, _members(run, _CONTROLLER) as (controller,):
            await _stats(controller, "alpha")
            _, writer = await asyncio.open_connection("127.0.0.1", int(run.endpoints["alpha"].rpartition(":")[2]))
            writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
            await writer.drain()
            writer.close()
            await _stats(controller, "alpha")

    asyncio.run(scenario())


def test_a_member_needs_the_keys_of_its_own_site() -> None:
    with pytest.raises(HetrlError, match="the keys are those of site beta"):
        Member(_CONTROLLER, "run", "tcp://127.0.0.1:1", make_run_keys(_SITES)["beta"])


# ---- the process


def _member_file(folder: Path, endpoint: str) -> Path:
    keys = make_run_keys(("alpha",))["alpha"]
    write_keys(folder / "alpha.key", keys)
    raw = {"run": "run", "site": "alpha", "bind": endpoint, "peers": {}, "hold_seconds": 300}
    raw["keys"] = str(folder / "alpha.key")
    (folder / "gateway.json").write_text(json.dumps(raw))
    return folder / "gateway.json"


def _gateway_process(member_file: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "hetrl.runtime.gateway", "--member", str(member_file)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_a_taken_port_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = _gateway_process(_member_file(tmp_path, f"tcp://127.0.0.1:{port}"))
        _, said = process.communicate(timeout=20)
    assert process.returncode == 1
    assert said == (
        f"alpha: port {port} for the gateway is taken on 127.0.0.1; "
        "stop what uses it or set gateway_port in the site's file\n"
    )


def test_sigterm_ends_a_gateway_with_0(tmp_path: Path) -> None:
    process = _gateway_process(_member_file(tmp_path, _free_endpoint()))
    assert process.stderr is not None
    assert "the gateway listens on" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_member_file_that_lacks_a_key_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text("{}")
    process = _gateway_process(tmp_path / "gateway.json")
    _, said = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "not a gateway's member file" in said
