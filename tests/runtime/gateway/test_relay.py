"""A relay on loopback: who gets in, who is paired with whom, and what strangers get."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrl.errors import HetrlError, SiteUnreachableError, UsageError
from hetrl.runtime.gateway import relay as relay_module, relay_door, relay_protocol, tcp
from hetrl.runtime.gateway.relay import Relay
from hetrl.runtime.gateway.relay_client import dial, enter, paired
from hetrl.runtime.gateway.relay_protocol import DIAL, OFFER, Request, WrongKeyError, key_of_run

ROOT = Path(__file__).parents[3]
SECRET = "5" * 64
RUN = "gsm8k-20260101-000000"
KEY = key_of_run(SECRET, RUN)
NAMES = st.text(min_size=1, max_size=12).filter(lambda text: text.isprintable())


# ---- the lines


@given(st.sampled_from([OFFER, DIAL]), NAMES, NAMES)
def test_a_request_arrives_as_it_was_sent(role: str, run: str, site: str) -> None:
    nonce, _ = relay_protocol.greeting()
    request = Request(role, run, site)
    line = relay_protocol.request_line(request, nonce, key_of_run(SECRET, run))
    assert relay_protocol.parse_request(line, nonce, SECRET) == request
    assert SECRET.encode() not in line


@given(NAMES, NAMES)
def test_a_key_fits_its_run_its_relay_and_its_nonce_alone(run: str, other: str) -> None:
    nonce, _ = relay_protocol.greeting()
    request = Request(DIAL, run, "beta")
    lines = [
        relay_protocol.request_line(request, nonce, key_of_run(SECRET, run + other)),
        relay_protocol.request_line(request, nonce, key_of_run("6" * 64, run)),
        relay_protocol.request_line(request, relay_protocol.greeting()[0], key_of_run(SECRET, run)),
        relay_protocol.request_line(Request(OFFER, run, "beta"), nonce, key_of_run(SECRET, run)).replace(
            b"offer", b"dial"
        ),
    ]
    for line in lines:
        with pytest.raises(WrongKeyError):
            relay_protocol.parse_request(line, nonce, SECRET)


@given(st.binary(max_size=600))
def test_garbage_is_a_value_error_in_each_direction(line: bytes) -> None:
    with pytest.raises(ValueError):
        relay_protocol.parse_request(line, "0" * 32, SECRET)
    with pytest.raises(ValueError):
        relay_protocol.nonce_of(line)


def test_names_that_fit_in_no_line_are_refused_before_they_are_sent() -> None:
    with pytest.raises(HetrlError, match="too long for a relay"):
        relay_protocol.request_line(Request(DIAL, "r" * 500, "beta"), "0" * 32, KEY)


def test_no_two_nonces_are_equal() -> None:
    assert len({relay_protocol.greeting()[0] for _ in range(1000)}) == 1000


# ---- the relay


@asynccontextmanager
async def a_relay(connections: int = 512, per_address: int = 512) -> AsyncIterator[tuple[Relay, str]]:
    listener = tcp.listen("127.0.0.1", 0)
    relay = Relay(listener, SECRET, connections=connections, per_address=per_address)
    serving = asyncio.create_task(relay.serve())
    try:
        yield relay, f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def offered(address: str, site: str = "beta", key: bytes = KEY, run: str = RUN) -> socket.socket:
    return await enter(address, Request(OFFER, run, site), key, tcp.connect)


async def dialled(address: str, site: str = "beta", key: bytes = KEY, run: str = RUN) -> socket.socket:
    return await dial(address, Request(DIAL, run, site), key, tcp.connect)


async def everything(connection: socket.socket) -> bytes:
    loop, text = asyncio.get_running_loop(), b""
    async with asyncio.timeout(20):
        while piece := await loop.sock_recv(connection, 65536):
            text += piece
    return text


def test_a_dial_and_an_offer_are_connected_in_either_order_and_to_the_last_byte() -> None:
    async def scenario(offer_first: bool) -> None:
        async with a_relay() as (relay, address):
            if offer_first:
                there = await offered(address)
                here = await dialled(address)
            else:
                dialling = asyncio.create_task(dialled(address))
                await until(lambda: relay.status["dials_waiting"] == 1)
                there = await offered(address)
                here = await dialling
            await paired(there, address)
            question, answer = os.urandom(1_000_000), os.urandom(3_000_000)
            asking = asyncio.create_task(tcp.send(here, question))
            answering = asyncio.create_task(tcp.send(there, answer))
            reading = asyncio.create_task(everything(there))
            await asking
            here.shutdown(socket.SHUT_WR)  # the other direction goes on
            assert await reading == question
            reading = asyncio.create_task(everything(here))
            await answering
            there.close()
            assert await reading == answer
            await until(lambda: relay.status["connections"] == 0)
            assert relay.status["bytes"] == len(question) + len(answer)
            here.close()

    for offer_first in (True, False):
        asyncio.run(scenario(offer_first))


def test_each_dial_gets_an_offer_of_its_own_site_and_run() -> None:
    async def scenario() -> None:
        other = "another-run"
        async with a_relay() as (relay, address):
            ends = {
                ("beta", RUN): await offered(address),
                ("gamma", RUN): await offered(address, "gamma"),
                ("beta", other): await offered(address, "beta", key_of_run(SECRET, other), other),
            }
            for (site, run), there in ends.items():
                with there, await dialled(address, site, key_of_run(SECRET, run), run) as here:
                    await paired(there, address)
                    await tcp.send(here, f"{site} {run}\n".encode())
                    assert await tcp.read_through(there, b"\n", 100) == f"{site} {run}\n".encode()
            assert relay.status["paired"] == 3

    asyncio.run(scenario())


@pytest.mark.parametrize("key", [key_of_run("6" * 64, RUN), key_of_run(SECRET, "another-run"), b""])
def test_the_secret_of_another_relay_or_run_is_refused_by_name(key: bytes) -> None:
    async def scenario() -> None:
        async with a_relay() as (relay, address):
            for enters in (offered, dialled):
                with pytest.raises(SiteUnreachableError, match=f"relay {address} refused: the key is not"):
                    await enters(address, key=key)
            assert relay.status["refused"] == 2

    asyncio.run(scenario())


GARBAGE = [
    b"",
    b"\n",
    b"\x00" * 4096,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"dial a b " + b"0" * 64 + b"\n",
    b"dial %ff %00 " + b"0" * 64 + b"\n",
    b"offer " + b"a" * 600 + b"\n",
    b"offer\n",
]


def test_strangers_get_one_line_and_the_relay_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with a_relay() as (relay, address):
            for garbage in GARBAGE * 3:
                stranger = await tcp.connect(address)
                nonce_line = await tcp.read_through(stranger, b"\n", 100)
                assert nonce_line.startswith(b"hetrl-relay/1 ")
                await tcp.send(stranger, garbage)
                stranger.shutdown(socket.SHUT_WR)
                try:
                    said = await everything(stranger)
                except ConnectionResetError:  # what it did not read was thrown away
                    said = b"refused "
                assert said == b"" or (said.startswith(b"refused ") and said.count(b"\n") <= 1)
                stranger.close()
            there = await offered(address)
            with there, await dialled(address):
                await paired(there, address)
            await until(lambda: relay.status["connections"] == 0)
            assert relay.status["paired"] == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    refusals = [record for record in caplog.records if "refused" in record.message]
    assert 0 < len(refusals) < len(GARBAGE)  # not one for each


def test_who_says_nothing_is_dropped_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with a_relay() as (relay, address):
            monkeypatch.setattr(relay_module, "PREAMBLE_SECONDS", 0.2)
            with await tcp.connect(address) as silent:
                said = await everything(silent)
            assert said.splitlines()[-1] == b"refused no request within 0.2 s"
            monkeypatch.undo()
            with await offered(address), await dialled(address):
                assert relay.status["paired"] == 1

    asyncio.run(scenario())


def test_a_full_relay_says_so() -> None:
    async def scenario() -> None:
        async with a_relay(connections=2) as (_, address):
            first, second = await offered(address), await offered(address)
            with first, second, pytest.raises(SiteUnreachableError, match="refused: too many connections"):
                await offered(address)
        async with a_relay(per_address=2) as (relay, address):
            first, second = await offered(address), await offered(address)
            with first, second, pytest.raises(SiteUnreachableError, match="refused: too many connections from 127.0.0"):
                await offered(address)
            await until(lambda: relay.status["connections"] == 0)
            (await offered(address)).close()

    asyncio.run(scenario())


def test_a_dial_that_nobody_waits_for_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "DIAL_SECONDS", 0.05)

    async def scenario() -> None:
        async with a_relay() as (relay, address):
            with pytest.raises(SiteUnreachableError, match="refused: no gateway of beta waits here"):
                await dialled(address)
            await until(lambda: relay.status["connections"] == 0)

    asyncio.run(scenario())


def test_an_offer_that_left_or_spoke_too_early_is_paired_with_nobody() -> None:
    async def scenario() -> None:
        async with a_relay() as (relay, address):
            gone, early, there = [await offered(address) for _ in range(3)]
            gone.close()
            await tcp.send(early, b"x")
            await until(lambda: relay.status["offers_waiting"] == 1)
            with there, early, await dialled(address) as here:
                await paired(there, address)
                await tcp.send(here, b"hello\n")
                assert await tcp.read_through(there, b"\n", 10) == b"hello\n"

    asyncio.run(scenario())


def test_what_is_no_relay_is_said_to_be_none() -> None:
    async def scenario() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.2\n")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SiteUnreachableError, match=f"what answers at 127.0.0.1:{port} is no relay"):
            await offered(f"127.0.0.1:{port}")
        server.close()
        await server.wait_closed()
        with pytest.raises(SiteUnreachableError, match=f"cannot connect to 127.0.0.1:{port} .Connection refused"):
            await offered(f"127.0.0.1:{port}")

    asyncio.run(scenario())


def test_who_comes_as_the_time_of_the_oldest_stranger_is_up_gets_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_door, "STRANGERS", 1)

    async def scenario() -> str:
        door, over = relay_door.Door(10, 10), asyncio.Event()

        async def stranger() -> None:
            async with asyncio.timeout(0.05) as deadline:
                with door.greeted("192.0.2.1", deadline):
                    try:
                        await asyncio.sleep(60)
                    finally:
                        over.set()
                        await asyncio.sleep(0)  # its deadline is past, and it is not out yet

        waits = asyncio.create_task(stranger())
        await over.wait()
        async with asyncio.timeout(10) as deadline:
            with door.greeted("192.0.2.2", deadline):
                await asyncio.gather(waits, return_exceptions=True)
                return "let in"

    assert asyncio.run(scenario()) == "let in"


# ---- plain TCP


def test_an_address_that_never_answers_leaves_time_for_the_next() -> None:
    async def scenario() -> None:
        good = socket.create_server(("127.0.0.1", 0))
        with good, socket.socket() as full, socket.socket() as waits, socket.socket() as more:
            port = good.getsockname()[1]
            full.bind(("127.0.0.2", port))
            full.listen(0)
            for other in (waits, more):  # its queue is full: what comes next gets no answer
                other.setblocking(False)
                other.connect_ex(("127.0.0.2", port))
            await asyncio.sleep(0.2)

            async def found(*_: object, **__: object) -> list[tuple[object, ...]]:
                kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
                return [(*kind, (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

            asyncio.get_running_loop().getaddrinfo = found
            with await tcp.connect(f"relay.example.org:{port}", 2.0) as connection:
                assert connection.getpeername() == ("127.0.0.1", port)

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:70000", "host:1x", "::1:80", "host:²"])
def test_what_is_no_address_is_a_usage_error(address: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        tcp.host_and_port(address)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("tcp://a.b:1", ("a.b", 1)), ("127.0.0.1:65535", ("127.0.0.1", 65535)), ("[::1]:80", ("::1", 80))],
)
def test_addresses_have_two_parts(address: str, parts: tuple[str, int]) -> None:
    assert tcp.host_and_port(address) == parts


def test_a_splice_on_which_nothing_happens_ends() -> None:
    async def scenario() -> None:
        (here, one), (other, there) = socket.socketpair(), socket.socketpair()
        for end in (here, one, other, there):
            end.setblocking(False)
        await tcp.splice(one, other, idle_seconds=0.05)
        assert await everything(here) == await everything(there) == b""
        here.close()
        there.close()

    asyncio.run(scenario())


# ---- the verb


def relay_process(secret: Path, listen: str = "127.0.0.1:0") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.cli", "relay", "--listen", listen, "--secret", str(secret)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_verb_makes_a_secret_serves_and_ends_with_0(tmp_path: Path) -> None:
    secret = tmp_path / "hetrl" / "relay.secret"
    process = relay_process(secret)
    assert process.stderr is not None
    said = [process.stderr.readline(), process.stderr.readline()]
    assert said[0].startswith(f"made the secret {secret}")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert secret.read_text().strip() not in "".join(said)
    address = f"127.0.0.1:{said[1].split()[-1]}"

    async def meet() -> None:
        key = key_of_run(secret.read_text().strip(), RUN)
        there = await offered(address, key=key)
        with there, await dialled(address, key=key):
            await paired(there, address)

    asyncio.run(meet())
    taken = relay_process(secret, address)
    _, complaint = taken.communicate(timeout=20)
    where = address.replace(":", ", port ")
    expected = f"error: cannot listen on {where} (Address already in use); take another address or port\n"
    assert (taken.returncode, complaint) == (2, expected)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_the_verb_refuses_a_secret_that_others_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    process = relay_process(secret)
    _, complaint = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "others can read this relay secret (mode 644); chmod 600" in complaint


def test_the_status_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with a_relay() as (relay, address):
            with await offered(address):
                reporting = asyncio.create_task(relay_module.report_status(relay, every_seconds=0.01))
                await asyncio.sleep(0.1)
                reporting.cancel()

    asyncio.run(scenario())
    status = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (status["connections"], status["offers_waiting"], status["splices"]) == (1, 1, 0)
