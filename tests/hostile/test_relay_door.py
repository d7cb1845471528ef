"""Connections that say nothing, in any number and renewed, at a relay: gateways are let in all the same."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import suppress

import pytest

from hetrl.runtime.gateway import relay_door, relay_protocol, tcp
from hetrl.runtime.gateway.relay import Relay
from hetrl.runtime.gateway.relay_client import dial, enter, paired
from hetrl.runtime.gateway.relay_door import address_of
from hetrl.runtime.gateway.relay_protocol import DIAL, OFFER, Request, key_of_run

SECRET, RUN = "5" * 64, "run"
KEY = key_of_run(SECRET, RUN)
RENEWERS = 2 * relay_door.STRANGERS  # connections that an attacker keeps open


async def _renew(source: str, address: tuple[str, int], opened: Counter[str]) -> None:
    """Hold a connection open in silence, and open another one whenever it ends."""
    loop = asyncio.get_running_loop()
    while True:
        with suppress(OSError), socket.socket() as silent:
            silent.setblocking(False)
            silent.bind((source, 0))
            await loop.sock_connect(silent, address)
            opened[source] += 1
            while await loop.sock_recv(silent, 4096):
                continue


@pytest.mark.parametrize("sources", [["127.0.0.1"], ["127.0.0.2"], [f"127.0.1.{n}" for n in range(32)]])
def test_idle_connections_that_are_renewed_keep_no_gateway_out(sources: list[str]) -> None:
    async def scenario() -> None:
        listener = tcp.listen("127.0.0.1", 0)
        where = listener.getsockname()
        relay = Relay(listener, SECRET)
        serving = asyncio.create_task(relay.serve())
        opened: Counter[str] = Counter()
        attack = [asyncio.create_task(_renew(sources[n % len(sources)], where, opened)) for n in range(RENEWERS)]
        async with asyncio.timeout(60):
            while opened.total() < 2 * RENEWERS:
                await asyncio.sleep(0.01)
        address = f"127.0.0.1:{where[1]}"
        for number in range(6):
            before = opened.total()
            there = await enter(address, Request(OFFER, RUN, f"site{number}"), KEY, tcp.connect)
            with there, await dial(address, Request(DIAL, RUN, f"site{number}"), KEY, tcp.connect):
                await paired(there, address)
            assert opened.total() > before, "the attack went on meanwhile"
            assert relay.status["strangers"] <= relay_door.STRANGERS
        for task in (*attack, serving):
            task.cancel()
        await asyncio.gather(*attack, serving, return_exceptions=True)

    asyncio.run(scenario())


def test_the_oldest_of_the_most_crowded_address_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_door, "STRANGERS", 4)

    async def scenario() -> None:
        door = relay_door.Door(connections=9, per_address=9)
        ends: dict[str, str] = {}

        async def stand(name: str) -> None:
            try:
                async with asyncio.timeout(60) as deadline:
                    with door.greeted(name[0], deadline):
                        await asyncio.sleep(60)
            except relay_door.RefusedError as refusal:
                ends[name] = str(refusal)

        tasks = []
        for name, gone in {"a1": [], "b1": [], "b2": [], "a2": [], "c1": ["a1"], "a3": ["b1"], "a4": ["a2"]}.items():
            tasks.append(asyncio.create_task(stand(name)))
            before = len(ends)
            await asyncio.sleep(0.02)
            assert list(ends)[before:] == gone, name
        assert door.strangers == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert door.strangers == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
    ],
)
def test_hosts_are_told_apart_as_far_as_they_cannot_choose(peer: tuple[object, ...], address: str) -> None:
    class Connection(socket.socket):
        def getpeername(self) -> tuple[object, ...]:
            return peer

    with Connection() as connection:
        assert address_of(connection) == address


def test_somebody_who_is_gone_has_no_address() -> None:
    with socket.socket() as connection:
        assert address_of(connection) == "gone"


def test_a_request_opens_no_door_twice() -> None:
    """A line that was overheard is worth nothing at another connection."""
    nonce, _ = relay_protocol.greeting()
    line = relay_protocol.request_line(Request(OFFER, RUN, "beta"), nonce, KEY)
    with pytest.raises(relay_protocol.WrongKeyError):
        relay_protocol.parse_request(line, relay_protocol.greeting()[0], SECRET)
