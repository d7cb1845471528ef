"""The ways between two sites on loopback: bytes in at one end, out at the other. A gateway is an echo here."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError, UsageError
from hetrl.runtime.gateway import relay as relay_module, ssh_tunnel, tcp, ways
from hetrl.runtime.gateway.link_report import LinkReport
from hetrl.runtime.gateway.relay import Relay
from hetrl.runtime.gateway.relay_protocol import key_of_run
from hetrl.runtime.gateway.tcp import status_of
from hetrl.runtime.gateway.ways import Offer, SiteLinks, Way, open_ways
from tests.runtime.gateway.ways_cases import http_proxy

RUN, SECRET = "run-1", "5" * 64


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Try again at once."""
    monkeypatch.setattr(ways, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(ways, "LONGEST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(ssh_tunnel, "FIRST_PAUSE_SECONDS", 0.05)
    caplog.set_level(logging.INFO)


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """Serve as beta's gateway: send back what comes, to the end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def carried(*opened: ways.Ways) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one.carry()) for one in opened]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


async def echoed(endpoint: str, size_bytes: int = 1_000_000) -> None:
    """Send bytes to an endpoint and get them back, as a gateway does: again where the connection ends too early."""
    sent = os.urandom(size_bytes)
    async with asyncio.timeout(20):
        while await once(endpoint, sent) != sent:
            await asyncio.sleep(0.02)


async def once(endpoint: str, sent: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    with contextlib.suppress(OSError, HetrlError), await tcp.connect(endpoint) as connection:
        sending = asyncio.create_task(tcp.send(connection, sent))
        try:
            while len(received) < len(sent) and (piece := await loop.sock_recv(connection, 65536)):
                received += piece
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    return received


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.message for record in caplog.records if part in record.message]


def to_beta(**way: object) -> SiteLinks:
    return SiteLinks(links={"beta": Way(**{"streams": 4, **way})})


# ---- direct


def test_a_direct_way_is_the_peers_own_endpoint() -> None:
    opened = open_ways("alpha", RUN, to_beta(way="direct", endpoint="tcp://b:1"), "tcp://a:1", {})
    assert opened.endpoints == {"beta": "tcp://b:1"}


# ---- relay


@asynccontextmanager
async def a_relay(listener: socket.socket) -> AsyncIterator[Relay]:
    relay = Relay(listener, SECRET)
    serving = asyncio.create_task(relay.serve())
    try:
        yield relay
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def over_relay(relay: str, gateway: str, key: bytes, beta_key: bytes | None = None) -> tuple[ways.Ways, ways.Ways]:
    """Return the ways of alpha, which dials beta at the relay, and of beta, which waits there."""
    alpha = open_ways("alpha", RUN, to_beta(way="relay", endpoint=gateway, relay=relay), "tcp://a:1", {relay: key})
    waiting = SiteLinks(links={}, offers=(Offer(relay, 2),))
    return alpha, open_ways("beta", RUN, waiting, gateway, {relay: beta_key or key})


def test_over_a_relay_many_connections_at_once_and_one_after_the_other() -> None:
    async def scenario() -> None:
        listener = tcp.listen("127.0.0.1", 0)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with echo() as gateway, a_relay(listener) as relay:
            alpha, beta = over_relay(address, gateway, key_of_run(SECRET, RUN))
            async with carried(alpha, beta):
                await asyncio.gather(*(echoed(alpha.endpoints["beta"]) for _ in range(10)))
                await echoed(alpha.endpoints["beta"])
                assert relay.status["paired"] == 11
                await until(lambda: relay.status["splices"] == 0 and relay.status["offers_waiting"] == 2)

    asyncio.run(scenario())


def test_a_relay_that_goes_and_comes_back_is_used_again_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        listener = tcp.listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        async with echo() as gateway:
            alpha, beta = over_relay(f"127.0.0.1:{port}", gateway, key_of_run(SECRET, RUN))
            async with carried(alpha, beta):
                async with a_relay(listener):
                    await echoed(alpha.endpoints["beta"])
                for _ in range(5):
                    assert await once(alpha.endpoints["beta"], b"x") == b""
                async with a_relay(tcp.listen("127.0.0.1", port)):
                    await echoed(alpha.endpoints["beta"])

    asyncio.run(scenario())
    for link in ("alpha -> beta by relay", "beta <- its peers by relay"):
        assert len([line for line in said(caplog, link) if "Connection refused" in line]) == 1
        assert len([line for line in said(caplog, link) if line.endswith(": connected")]) == 2


@pytest.mark.parametrize("wrong", ["alpha", "beta"])
def test_the_key_of_another_run_is_named_at_the_site_that_has_it(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        listener = tcp.listen("127.0.0.1", 0)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        right, other = key_of_run(SECRET, RUN), key_of_run(SECRET, "run-2")
        async with echo() as gateway, a_relay(listener):
            keys = (other, right) if wrong == "alpha" else (right, other)
            alpha, beta = over_relay(address, gateway, *keys)
            async with carried(alpha, beta):
                if wrong == "alpha":
                    assert await once(alpha.endpoints["beta"], b"x") == b""
                await until(lambda: said(caplog, "refused: the key is not that of this relay and run"))

    asyncio.run(scenario())
    assert {line.split()[0] for line in said(caplog, "refused: the key is not")} == {wrong}


def test_a_peer_that_does_not_wait_at_the_relay_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_module, "DIAL_SECONDS", 0.05)

    async def scenario() -> None:
        listener = tcp.listen("127.0.0.1", 0)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with a_relay(listener):
            alpha, _ = over_relay(address, "tcp://127.0.0.1:1", key_of_run(SECRET, RUN))
            async with carried(alpha):
                for _ in range(3):
                    assert await once(alpha.endpoints["beta"], b"x") == b""

    asyncio.run(scenario())
    assert len(said(caplog, "refused: no gateway of beta waits here; trying on")) == 1


def test_a_run_without_the_key_of_its_relay_is_an_error() -> None:
    with pytest.raises(HetrlError, match="no key for relay r:1; submit the run again"):
        open_ways("alpha", RUN, to_beta(way="relay", endpoint="tcp://b:1", relay="r:1"), "tcp://a:1", {})


# ---- proxy


def test_through_a_proxy_with_a_password() -> None:
    async def scenario() -> None:
        async with echo() as gateway, http_proxy(password="ada:secret") as (proxy, requests):
            links = to_beta(way="proxy", endpoint=gateway, proxy=proxy)
            alpha = open_ways("alpha", RUN, links, "tcp://a:1", {}, proxy_credentials="ada:secret")
            async with carried(alpha):
                await asyncio.gather(*(echoed(alpha.endpoints["beta"]) for _ in range(3)))
        target = gateway.removeprefix("tcp://")
        assert requests[0].startswith(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n".encode())

    asyncio.run(scenario())


def test_a_relay_behind_a_proxy() -> None:
    async def scenario() -> None:
        listener = tcp.listen("127.0.0.1", 0)
        address, key = f"127.0.0.1:{listener.getsockname()[1]}", key_of_run(SECRET, RUN)
        async with echo() as gateway, a_relay(listener), http_proxy() as (proxy, requests):
            links = to_beta(way="relay", endpoint=gateway, relay=address, proxy=proxy)
            alpha = open_ways("alpha", RUN, links, "tcp://a:1", {address: key})
            waiting = SiteLinks(links={}, offers=(Offer(address, 1, proxy),))
            async with carried(alpha, open_ways("beta", RUN, waiting, gateway, {address: key})):
                await echoed(alpha.endpoints["beta"])
        assert {request.split()[1].decode() for request in requests} == {address}
        assert len(requests) >= 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "password", "message"),
    [
        (
            b"HTTP/1.1 403 Forbidden\r\n\r\n",
            None,
            "answered 403 Forbidden to CONNECT 127.0.0.1:9; the proxy forbids it",
        ),
        (
            b"",
            "ada:secret",
            "answered 407 Proxy Authentication Required .*; it wants a password: set proxy_credentials",
        ),
        (b"HTTP/1.1 503 \r\n\r\n", None, "answered 503 .*the proxy cannot reach it"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", None, "answered 0 .not HTTP."),
        (b"x" * 20_000, None, "gave no answer of HTTP"),
    ],
)
def test_what_a_proxy_refuses_is_said_once_with_a_remedy(
    answer: bytes, password: str | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with http_proxy(answer, password) as (proxy, _):
            links = to_beta(way="proxy", endpoint="tcp://127.0.0.1:9", proxy=proxy)
            alpha = open_ways("alpha", RUN, links, "tcp://a:1", {})
            async with carried(alpha):
                for _ in range(3):
                    assert await once(alpha.endpoints["beta"], b"x") == b""

    asyncio.run(scenario())
    (line,) = said(caplog, "alpha -> beta by proxy")
    assert re.search(message, line)


@given(st.binary(max_size=200))
def test_any_answer_has_a_status(answer: bytes) -> None:
    status, reason = status_of(answer)
    assert 0 <= status <= 999
    assert reason.isprintable()


# ---- ssh


def test_the_command_of_a_tunnel() -> None:
    command = ssh_tunnel.ssh_command("ada@login.b", "node7:5000", 4711, "/home/ada/config")
    assert command[:4] == ["ssh", "-T", "-F", "/home/ada/config"]
    assert command[-5:] == ["-N", "-L", "127.0.0.1:4711:node7:5000", "--", "ada@login.b"]
    given = {word for flag, word in itertools.pairwise(command) if flag == "-o"}
    assert {"BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=5", "ServerAliveCountMax=3"} <= given


def test_a_machine_without_ssh_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    links = to_beta(way="ssh", endpoint="tcp://b:1", login="ada@b")
    with pytest.raises(UsageError, match="alpha: there is no ssh here, and the way to beta is ssh; install"):
        open_ways("alpha", RUN, links, "tcp://a:1", {})


@pytest.mark.parametrize(
    ("last_line", "remedy"),
    [
        ("ada@b: Permission denied (publickey).", "the key must work without a prompt"),
        ("Host key verification failed.", "log in there once by hand"),
        ("ssh: Could not resolve hostname b: Name or service not known", "correct `login`"),
        ("kex_exchange_identification: read: Connection reset by peer", "trying on"),
    ],
)
def test_an_ssh_that_ends_is_told_of_once_with_its_last_line(
    last_line: str, remedy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = tmp_path / "tries"
    script = f'echo x >> "{tries}"; echo "debug" >&2; echo "{last_line}" >&2; exit 255'

    async def scenario() -> None:
        tunnel = asyncio.create_task(
            ssh_tunnel.keep_tunnel(["bash", "-c", script], LinkReport("alpha -> beta by ssh b"))
        )
        await until(lambda: tries.exists() and len(tries.read_text().splitlines()) > 2)
        tunnel.cancel()
        await asyncio.gather(tunnel, return_exceptions=True)

    asyncio.run(scenario())
    (line,) = said(caplog, "alpha -> beta by ssh b: ssh ended: ")
    assert last_line in line and remedy in line
