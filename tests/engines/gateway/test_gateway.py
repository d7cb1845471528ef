"""Gateways and members over real CURVE sockets on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.gateway import seat
from hetrl.runtime.gateway.gateway_process import read_gateway
from hetrl.runtime.transport import exchange, heartbeat, member, notice
from hetrl.runtime.transport.member import DeadlineError, Member, RunAborted
from hetrl.runtime.wire.keys import make_run_keys, write_keys
from tests.engines.transport.transport_runs import (
    BETA,
    BETA_1,
    CONTROLLER,
    CRITIC,
    GAMMA,
    SITES,
    TRAINER,
    answer,
    bare_socket,
    free_endpoint,
    members,
    running,
    stats,
    until,
)

_STEP = {"timeout_seconds": 20.0, "doing": "step 12: generate group 3"}
_PUBLISHED = wire.Published(version=3, digest="d", bytes=1, seconds=0.5, apply_seconds={GAMMA: 1.0})


def test_a_request_crosses_two_sites_and_its_reply_comes_back() -> None:
    async def scenario() -> None:
        async with running() as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            answering = asyncio.create_task(answer(rollout, _PUBLISHED))
            reply = await controller.request(BETA, wire.Publish(version=3, receivers=(GAMMA,)), **_STEP)
            await answering
            assert reply.message == _PUBLISHED
            assert reply.header.source == BETA

    asyncio.run(scenario())


def test_concurrent_requests_get_their_own_replies() -> None:
    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER, TRAINER) as (controller, trainer):
            asking = [
                asyncio.create_task(controller.request(TRAINER, wire.Publish(version=version, receivers=()), **_STEP))
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
            running() as run,
            members(run, CONTROLLER, TRAINER, BETA, BETA_1, GAMMA) as (controller, trainer, *rollouts),
        ):
            await trainer.send((BETA, GAMMA, BETA_1), wire.WeightsBegin(version=1, encoding="full"), [piece])
            for rollout in rollouts:
                assert bytes((await rollout.receive(20)).buffers[0]) == piece
            at = {site: await stats(controller, site) for site in SITES}
            for site in ("beta", "gamma"):
                link = at["alpha"].links[site]
                assert len(piece) < link.bytes_sent < len(piece) + 10_000
                assert len(piece) < at[site].links["alpha"].bytes_received < len(piece) + 10_000
            assert at["beta"].links["gamma"].bytes_sent < 10_000

    asyncio.run(scenario())


def test_large_buffers_arrive_byte_identical() -> None:
    blob = hashlib.shake_128(b"seed").digest(20_000_000)

    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, TRAINER, BETA) as (trainer, rollout):
            for buffers in ([blob], [blob[:3], b"", memoryview(blob)[5:]]):
                await trainer.send(BETA, wire.Done(), buffers)
                assert [bytes(buffer) for buffer in (await rollout.receive(20)).buffers] == [bytes(b) for b in buffers]

    asyncio.run(scenario())


def test_a_sender_waits_for_a_receiver_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WINDOW_BYTES", 1_000_000)
    piece = b"p" * 400_000

    async def scenario() -> None:
        everyone = (CONTROLLER, TRAINER, BETA)
        async with running("alpha", "beta") as run, members(run, *everyone) as (controller, trainer, rollout):
            sent = 0

            async def send_all() -> None:
                nonlocal sent
                for version in range(6):
                    await trainer.send(BETA, wire.WeightsBegin(version=version, encoding="full"), [piece])
                    sent += 1

            sending = asyncio.create_task(send_all())
            await until(lambda: sent == 2)
            # What has no buffers does not wait.
            await stats(controller, "beta")
            assert sent == 2
            assert [(await rollout.receive(20)).message.version for _ in range(6)] == list(range(6))
            await sending

    asyncio.run(scenario())


def test_two_sites_that_flood_each_other_both_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "WINDOW_BYTES", 2_000_000)

    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, TRAINER, BETA) as (trainer, rollout):

            async def flood(source: Member, to: str) -> None:
                for _ in range(40):
                    await source.send(to, wire.Done(), [b"f" * 1_000_000])

            async def take(member: Member) -> int:
                return sum([len((await member.receive(20)).buffers[0]) for _ in range(40)])

            *_, there, here = await asyncio.gather(
                flood(trainer, BETA), flood(rollout, TRAINER), take(rollout), take(trainer)
            )
            assert (there, here) == (40_000_000, 40_000_000)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (CRITIC, f"alpha: {CRITIC} cannot be reached"),
        ("beta/reward/7", "beta: beta/reward/7 cannot be reached"),
        ("delta/reward/0", "delta/reward/0 is no member of this run"),
        (GAMMA, "alpha -> gamma: no connection for 0.3 s"),
    ],
)
def test_a_receiver_that_is_not_there_is_named(to: str, said: str) -> None:
    async def scenario() -> None:
        async with running("alpha", "beta", hold_seconds=0.3) as run, members(run, CONTROLLER) as (controller,):
            await until(lambda: run.gateways["alpha"].stats().links["beta"].round_trip_seconds is not None)
            with pytest.raises(HetrlError, match=said) as error:
                await controller.request(to, wire.Finish(), [b"x"], **_STEP)
            assert "step 12: generate group 3" in str(error.value)

    asyncio.run(scenario())


def test_a_link_that_both_sides_gave_up_comes_back() -> None:
    async def scenario() -> None:
        async with running("alpha", "beta") as run:
            ends = [run.gateways["alpha"]._delivery.links["beta"], run.gateways["beta"]._delivery.links["alpha"]]
            for link in ends:
                link.gone = "given up"
            await until(lambda: all(link.gone is None for link in ends))

    asyncio.run(scenario())


def test_a_plain_send_to_nobody_comes_back_undeliverable() -> None:
    async def scenario() -> None:
        async with running("alpha", hold_seconds=0.1) as run, members(run, CONTROLLER) as (controller,):
            sent = await controller.send(TRAINER, wire.Finish())
            envelope = await controller.receive(20)
            assert isinstance(envelope.message, wire.Undeliverable)
            assert (envelope.message.receiver, envelope.header.reply_to) == (TRAINER, sent)

    asyncio.run(scenario())


def test_a_deadline_names_peer_site_and_purpose() -> None:
    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            with pytest.raises(DeadlineError, match=f"beta: {BETA} did not answer {CONTROLLER} within 0.2 s .step 12"):
                await controller.request(BETA, wire.Finish(), timeout_seconds=0.2, doing="step 12: generate group 3")
            with pytest.raises(DeadlineError, match=f"{CONTROLLER}: no message arrived within 0.1 s"):
                await controller.receive(0.1)
            # The answer that comes too late disturbs nobody.
            await answer(rollout, wire.Done())
            answering = asyncio.create_task(answer(rollout, wire.Done()))
            await controller.request(BETA, wire.Finish(), **_STEP)
            await answering

    asyncio.run(scenario())


def test_a_failed_peer_is_named_with_its_cause() -> None:
    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER, TRAINER) as (controller, trainer):
            answering = asyncio.create_task(answer(trainer, wire.Failed(cause="out of memory")))
            with pytest.raises(HetrlError, match=f"{TRAINER} failed .step 12: generate group 3.: out of memory"):
                await controller.request(TRAINER, wire.Finish(), **_STEP)
            await answering

    asyncio.run(scenario())


def test_an_abort_reaches_whoever_waits() -> None:
    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            requesting = asyncio.create_task(rollout.request(CONTROLLER, wire.Done(), **_STEP))
            receiving = asyncio.create_task(rollout.receive())
            await controller.receive(20)
            await controller.send(BETA, wire.Abort(cause="beta: node 3 is gone; resume the run"))
            for waiting in (requesting, receiving, rollout.receive(), rollout.send(CONTROLLER, wire.Done())):
                with pytest.raises(RunAborted, match=f"{CONTROLLER} ended the run: beta: node 3 is gone"):
                    await waiting

    asyncio.run(scenario())


def test_members_may_start_before_their_gateway() -> None:
    async def scenario() -> None:
        async with running("beta") as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            join = wire.Join(ranks=1, host="h", pid=1, engines={"vllm": "0"})
            await rollout.send(CONTROLLER, join)
            requesting = asyncio.create_task(controller.request(BETA, wire.Finish(), **_STEP))
            run.start("alpha")
            assert (await controller.receive(20)).message == join
            await answer(rollout, wire.Done())
            assert (await requesting).message == wire.Done()

    asyncio.run(scenario())


def test_members_and_sites_find_a_gateway_again() -> None:
    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            for _ in range(2):
                answering = asyncio.create_task(answer(rollout, wire.Done()))
                await controller.request(BETA, wire.Finish(), **_STEP)
                await answering
                await run.stop("beta")
                run.start("beta")

    asyncio.run(scenario())


def test_a_member_that_comes_back_gets_what_is_sent_to_its_address() -> None:
    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            for _ in range(3):
                async with run.member(TRAINER) as trainer:
                    answering = asyncio.create_task(answer(trainer, wire.Done()))
                    await trainer.send(CONTROLLER, wire.Heartbeat())
                    await controller.receive(20)
                    await until(lambda: TRAINER in run.gateways["alpha"]._delivery.seats)
                    await controller.request(TRAINER, wire.Finish(), **_STEP)
                    await answering

    asyncio.run(scenario())


def test_a_sender_is_told_of_a_receiver_that_died_with_a_full_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "RECONNECT_SECONDS", 0.2)
    monkeypatch.setattr(exchange, "WINDOW_BYTES", 1_000_000)

    async def scenario() -> None:
        async with running("alpha", hold_seconds=1000) as run, members(run, CONTROLLER) as (controller,):
            async with run.member(TRAINER):
                await controller.send(TRAINER, wire.Done(), [b"x" * 900_000])
                await until(lambda: not controller._exchange.unacknowledged)
            await controller.send(TRAINER, wire.Finish(), [b"y" * 900_000])
            envelope = await controller.receive(20)
            assert isinstance(envelope.message, wire.Undeliverable)

    asyncio.run(scenario())


def test_a_request_to_a_member_that_is_lost_ends_without_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seat, "RECONNECT_SECONDS", 0.2)

    async def scenario() -> None:
        async with running("alpha", hold_seconds=1000) as run, members(run, CONTROLLER) as (controller,):
            async with run.member(TRAINER):
                await until(lambda: TRAINER in run.gateways["alpha"]._delivery.seats)
            with pytest.raises(HetrlError, match=f"{TRAINER} has not been connected for 0.2 s"):
                await controller.request(TRAINER, wire.Finish(), **_STEP)

    asyncio.run(scenario())


def test_a_message_that_a_stopping_gateway_did_not_carry_arrives_after_all() -> None:
    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, TRAINER, BETA) as (trainer, rollout):
            await until(lambda: run.gateways["alpha"].stats().links["beta"].round_trip_seconds is not None)
            await trainer.send(BETA, wire.Done(), [b"l" * 40_000_000])
            await until(lambda: run.gateways["alpha"].stats().links["beta"].bytes_sent > 1_000_000)
            await run.stop("alpha")
            run.start("alpha")
            assert len((await rollout.receive(20)).buffers[0]) == 40_000_000

    asyncio.run(scenario())


def test_heartbeats_arrive_until_the_member_closes() -> None:
    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, CONTROLLER) as (controller,):
            async with run.member(BETA) as rollout:
                rollout.start_heartbeat(lambda: (CONTROLLER,), every_seconds=0.01)
                arrived = [await controller.receive(20) for _ in range(3)]
            assert {(envelope.header.source, type(envelope.message)) for envelope in arrived} == {
                (BETA, wire.Heartbeat)
            }

    asyncio.run(scenario())


def test_the_word_that_slurm_ends_a_job_waits_for_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_NOTICE_SECONDS", 0.01)
    monkeypatch.setattr(notice, "LOOK_SECONDS", 0.0)

    async def scenario() -> None:
        run_of_two = running("alpha", "beta", folder=tmp_path)
        async with run_of_two as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            rollout.start_heartbeat(lambda: (CONTROLLER,), every_seconds=600.0)
            assert (await controller.receive(20)).message == wire.Heartbeat(doing="", ending=False)
            (tmp_path / "beta" / notice.ENDING).touch()
            assert (await controller.receive(20)).message == wire.Heartbeat(doing="", ending=True)
            with pytest.raises(DeadlineError):  # said once
                await controller.receive(0.3)

    asyncio.run(scenario())


def test_a_member_ends_when_nothing_comes_of_whom_it_expects_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the controller says anything it goes on, and hears nothing of that."""
    monkeypatch.setattr(heartbeat, "_LISTEN_SECONDS", 0.02)

    async def scenario() -> None:
        told = [BETA]
        async with running("alpha", "beta") as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            rollout.expect_word_of(CONTROLLER, within_seconds=0.5, first_seconds=20.0)
            controller.start_heartbeat(lambda: told, every_seconds=0.01)
            with pytest.raises(DeadlineError):
                await rollout.receive(1.5)
            await controller.send(BETA, wire.Go())
            assert (await rollout.receive(20)).message == wire.Go()
            told.clear()
            with pytest.raises(RunAborted, match=f"no word of {CONTROLLER} for 0.5 s .launch.orphan_timeout."):
                await rollout.receive(20)

    asyncio.run(scenario())


def test_the_first_word_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_LISTEN_SECONDS", 0.02)

    async def scenario() -> None:
        async with running("alpha", "beta") as run, members(run, BETA) as (rollout,):
            rollout.expect_word_of(CONTROLLER, within_seconds=0.1, first_seconds=1.0)
            with pytest.raises(DeadlineError):
                await rollout.receive(0.5)
            with pytest.raises(RunAborted, match="for 1 s"):
                await rollout.receive(20)

    asyncio.run(scenario())


@pytest.mark.parametrize("hold_seconds", [0.5, 600.0])
def test_a_gateway_ends_when_no_word_of_the_controller_passes_it(hold_seconds: float) -> None:
    async def scenario() -> None:
        async with running("alpha", "beta", hold_seconds=hold_seconds, orphan_seconds=1.0) as run:
            async with run.member(BETA), run.member(CONTROLLER) as controller:
                controller.start_heartbeat(lambda: (BETA,), every_seconds=0.05)
                await asyncio.sleep(3.0)
                assert not run.ended("beta")
            with pytest.raises(HetrlError, match="beta: no word of the controller for 1 s .launch.orphan_timeout."):
                await run.end_of("beta")
            with pytest.raises(HetrlError, match="alpha: no word of the controller"):
                await run.end_of("alpha")

    asyncio.run(scenario())


def test_a_stranger_gets_nothing_and_is_counted() -> None:
    stranger_keys = make_run_keys(SITES)

    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            async with bare_socket(run, stranger_keys["alpha"]) as stranger:
                stranger.send_multipart(_frames(CRITIC, CONTROLLER, wire.Abort(cause="x")))
                await until(lambda: run.gateways["alpha"].stats().refused > 0)
            with pytest.raises(DeadlineError):
                await controller.receive(0.2)
            seen = await stats(controller, "alpha")
            assert seen.refused == run.gateways["alpha"].stats().refused
            assert seen.malformed == 0  # nothing of it came through

    asyncio.run(scenario())


def _frames(source: str, to: str, message: wire.Message, run: str = "run") -> list[bytes]:
    return wire.encode(wire.Header(run=run, source=source, to=(to,), id=7), message)


def test_garbage_is_dropped_and_counted() -> None:
    garbage = [
        [b""],
        [b"\xc1", b"\xff"],
        _frames(TRAINER, CONTROLLER, wire.Done())[:1],
        [_frames(TRAINER, "alpha/gateway/0", wire.Done())[0], b"\xc1"],
        _frames(TRAINER, CONTROLLER, wire.Done(), run="other"),
        _frames(BETA, CONTROLLER, wire.Abort(cause="with the key of another site")),
        wire.encode(wire.Header(run="run", source=TRAINER, to=(), id=1), wire.Done()),
    ]

    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            async with bare_socket(run, run.keys["alpha"]) as bare:
                for frames in garbage:
                    bare.send_multipart(frames)
                # What a gateway cannot judge, the receiver drops.
                bare.send_multipart([_frames(TRAINER, CONTROLLER, wire.Done())[0], b"\xc1"])
                bare.send_multipart(_frames(TRAINER, CONTROLLER, wire.Done()))
                bare.send_multipart(_frames(TRAINER, CONTROLLER, wire.Heartbeat()))
                assert (await controller.receive(20)).message == wire.Heartbeat()
            assert (await stats(controller, "alpha")).offences["alpha"] == len(garbage)
            assert controller.offences == {TRAINER: 2}  # the second one outside the channels

    asyncio.run(scenario())


def test_a_member_needs_the_keys_of_its_own_site() -> None:
    with pytest.raises(HetrlError, match="the keys are those of site beta"):
        Member(CONTROLLER, "run", "tcp://127.0.0.1:1", make_run_keys(SITES)["beta"])


def test_a_message_that_no_receiver_would_accept_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "MESSAGE_BYTES", 1000)

    async def scenario() -> None:
        async with running("alpha") as run, members(run, CONTROLLER) as (controller,):
            with pytest.raises(HetrlError, match=f"{CONTROLLER}: Done has 10.* bytes, at most 1000 may go at once"):
                await controller.send(TRAINER, wire.Done(), [b"x" * 1000])

    asyncio.run(scenario())


# ---- the process


def _member_file(folder: Path, endpoint: str) -> Path:
    keys = make_run_keys(("alpha",))["alpha"]
    write_keys(folder / "alpha.key", keys)
    raw = {"run": "run", "site": "alpha", "bind": endpoint, "members": [], "links": {}, "hold_seconds": 300}
    raw["keys"] = str(folder / "alpha.key")
    (folder / "gateway.json").write_text(json.dumps(raw))
    return folder / "gateway.json"


def _gateway_process(member_file: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "hetrl.runtime.gateway.gateway_process", "--member", str(member_file)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_gateway_with_0(tmp_path: Path, number: signal.Signals) -> None:
    process = _gateway_process(_member_file(tmp_path, free_endpoint()))
    assert process.stderr is not None
    assert "the gateway listens on" in process.stderr.readline()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_member_file_that_lacks_a_key_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text("{}")
    process = _gateway_process(tmp_path / "gateway.json")
    _, said = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "not a gateway's member file" in said


def test_each_link_has_the_streams_that_its_way_says(tmp_path: Path) -> None:
    write_keys(tmp_path / "alpha.key", make_run_keys(SITES)["alpha"])
    links = {
        site: {"way": "direct", "endpoint": free_endpoint(), "streams": streams}
        for site, streams in (("beta", 1), ("gamma", 6))
    }
    raw = {"run": "run", "site": "alpha", "bind": free_endpoint(), "members": [], "hold_seconds": 1, "links": links}
    (tmp_path / "gateway.json").write_text(json.dumps({**raw, "keys": str(tmp_path / "alpha.key")}))
    gateway, _ = read_gateway(tmp_path / "gateway.json")
    assert {peer: link._count for peer, link in gateway._delivery.links.items()} == {"beta": 1, "gamma": 6}
