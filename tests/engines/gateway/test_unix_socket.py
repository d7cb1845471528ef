"""Members on the node of their gateway: a unix socket where one can be, TCP where not, and strangers on neither."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zmq

from hetrl.runtime import wire
from hetrl.runtime.gateway.zap import ZapHandler
from hetrl.runtime.transport.endpoints import is_here, unix_path
from hetrl.runtime.transport.member import Member
from hetrl.runtime.transport.sockets import Port
from tests.engines.transport.transport_runs import (
    BETA,
    CONTROLLER,
    TRAINER,
    Run,
    answer,
    members,
    running,
    stats,
    until,
)

_STEP = {"timeout_seconds": 30.0, "doing": "step 12"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory whose name is short enough, wherever pytest keeps its own."""
    with TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def _is_unix(member: Member) -> bool:
    return member._connection._is_unix


async def _ask(controller: Member, rollout: Member) -> None:
    answering = asyncio.create_task(answer(rollout, wire.Done()))
    await controller.request(rollout.address, wire.Finish(), **_STEP)
    await answering


def test_members_of_the_gateways_node_take_its_unix_socket(folder: Path) -> None:
    async def scenario() -> None:
        async with running("alpha", "beta", folder=folder) as run:
            await until(lambda: all(_socket(run, site).is_socket() for site in ("alpha", "beta")))
            async with members(run, CONTROLLER, BETA) as (controller, rollout):
                assert _is_unix(controller)
                await rollout.send(CONTROLLER, wire.WeightsBegin(version=1, encoding="full"), [bytes(5_000_000)])
                assert len((await controller.receive(20)).buffers[0]) == 5_000_000
                await _ask(controller, rollout)
        assert not _socket(run, "alpha").exists()

    asyncio.run(scenario())


def _socket(run: Run, site: str) -> Path:
    directory = run.directories[site]
    assert directory is not None
    return unix_path(directory, run.endpoints[site])


def test_members_change_over_when_their_gateway_comes_up_and_find_it_again(folder: Path) -> None:
    async def scenario() -> None:
        async with running("beta", folder=folder) as run, members(run, CONTROLLER, BETA) as (controller, rollout):
            await controller.send(BETA, wire.WeightsBegin(version=1, encoding="full"), [bytes(30_000_000)])
            run.start("alpha")
            assert len((await rollout.receive(20)).buffers[0]) == 30_000_000
            await until(lambda: _is_unix(controller))
            await _ask(controller, rollout)
            await run.stop("alpha")
            run.start("alpha")
            await _ask(controller, rollout)

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["others", "long"])
def test_without_a_directory_of_its_own_a_gateway_offers_tcp_alone(
    folder: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "long":
        folder /= "x" * 80
        folder.mkdir()

    async def scenario() -> None:
        run = Run({}, {"hold_seconds": 20.0}, folder)
        directory = _socket(run, "alpha").parent
        if why == "others":
            directory.chmod(0o750)
        run.start("alpha")
        try:
            async with members(run, CONTROLLER, TRAINER) as (controller, trainer):
                await _ask(controller, trainer)
                assert not _is_unix(controller)
        finally:
            await run.stop_all()
        assert list(directory.iterdir()) == []

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    said = {"others": "is not this user's alone (mode 750)", "long": "bytes, at most 107 are possible"}
    assert any(said[why] in message for message in caplog.messages)


@asynccontextmanager
async def _bare_unix_socket(run: Run) -> AsyncIterator[zmq.Socket[bytes]]:
    context: zmq.Context[Any] = zmq.Context()
    bare = context.socket(zmq.DEALER)
    bare.connect(f"ipc://{_socket(run, 'alpha')}")
    try:
        yield bare
    finally:
        bare.close(linger=0)
        context.term()


def test_a_peer_on_the_unix_socket_speaks_for_its_own_site_only(folder: Path) -> None:
    async def scenario() -> None:
        async with (
            running("alpha", folder=folder) as run,
            members(run, CONTROLLER) as (controller,),
            _bare_unix_socket(run) as bare,
        ):
            for source in (BETA, TRAINER):
                header = wire.Header(run="run", source=source, to=(CONTROLLER,), id=7)
                bare.send_multipart(wire.encode(header, wire.Abort(cause="x") if source == BETA else wire.Heartbeat()))
            assert (await controller.receive(20)).header.source == TRAINER
            assert (await stats(controller, "alpha")).malformed == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("domain", "address", "mechanism", "status"),
    [
        (b"unix", f"localhost:{os.geteuid()}:0:1", b"NULL", b"200"),
        (b"unix", f"localhost:{os.geteuid() + 1}:0:1", b"NULL", b"400"),
        (b"unix", "localhost", b"NULL", b"400"),
        (b"", f"localhost:{os.geteuid()}:0:1", b"NULL", b"400"),
        (b"unix", f"localhost:{os.geteuid()}:0:1", b"CURVE", b"400"),
    ],
    ids=["own user", "another user", "unknown user", "over TCP", "unknown key"],
)
def test_who_may_use_the_unix_socket_is_what_the_kernel_says(
    domain: bytes, address: str, mechanism: bytes, status: bytes
) -> None:
    async def scenario() -> list[bytes]:
        def failed(error: Exception) -> None:
            raise error

        context: zmq.Context[Any] = zmq.Context()
        zap = ZapHandler("alpha", {"key": "alpha"})
        zap.open(context, failed=failed)
        answered: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        socket = context.socket(zmq.REQ)
        socket.connect("inproc://zeromq.zap.01")
        asker = Port(socket, lambda frames: answered.set_result([frame.bytes for frame in frames]), failed=failed)
        try:
            credentials = [bytes(32)] if mechanism == b"CURVE" else []
            asker.send([b"1.0", b"1", domain, address.encode(), b"", mechanism, *credentials])
            return await asyncio.wait_for(answered, 20)
        finally:
            asker.close(0)
            zap.close()
            context.term()

    reply = asyncio.run(scenario())
    assert reply[2] == status
    assert reply[4] == (b"alpha" if status == b"200" else b"")


def test_an_endpoint_is_here_if_its_address_is_of_this_node() -> None:
    assert is_here("tcp://127.0.0.1:1234")
    assert not is_here("tcp://192.0.2.1:1234")
    assert not is_here("tcp://no-such-host.invalid:1234")
