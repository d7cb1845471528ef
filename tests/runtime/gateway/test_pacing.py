"""What crosses between sites leaves in no bursts: every connection that sends there has a pacing rate."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path

import zmq

from hetrl.runtime.gateway import tcp
from hetrl.runtime.gateway.peer_link import STREAMS, PeerLink
from hetrl.runtime.transport.pacing import pace_descriptor
from hetrl.runtime.transport.sockets import server_socket
from hetrl.runtime.wire.keys import make_run_keys

SO_MAX_PACING_RATE = 47  # Linux
UNPACED = 2**32 - 1


def rate_of(connection: socket.socket) -> int:
    """Return the limit in bytes per second; Linux paces where there is any."""
    return connection.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) % 2**32


def rates_to(port: int) -> list[int]:
    """Return the limits of this process's connections to a port of this machine, whoever made them."""
    found = []
    for descriptor in [*Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # a file, not connected, or closed by now
            one = socket.socket(fileno=int(descriptor.name))
            try:
                if one.family == socket.AF_INET and one.getpeername()[1] == port:
                    found.append(rate_of(one))
            finally:
                one.detach()
    return found


def test_each_stream_of_a_link_is_paced() -> None:
    async def scenario() -> None:
        keys = make_run_keys(["alpha", "beta"])
        with zmq.Context() as context, server_socket(context, keys["beta"]) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            link = PeerLink(
                "alpha", "beta", streams=STREAMS, lane_bytes=2**20, hold_seconds=60.0, patience_seconds=60.0
            )
            failures: list[Exception] = []
            link.open(context, keys["alpha"], f"tcp://127.0.0.1:{port}", lambda message: None, failures.append)
            try:
                async with asyncio.timeout(20):
                    rates: list[int] = []
                    while len(rates) <= STREAMS or UNPACED in rates:
                        await asyncio.sleep(0.02)
                        rates = rates_to(port)
            finally:
                link.close(0.0)
            assert not failures

    asyncio.run(scenario())


def test_both_ends_of_a_connection_below_zeromq_are_paced() -> None:
    async def scenario() -> None:
        with tcp.listen("127.0.0.1", 0) as listener:
            accepting = asyncio.create_task(tcp.accept(listener))
            with await tcp.connect(f"127.0.0.1:{listener.getsockname()[1]}") as near, await accepting as far:
                assert UNPACED not in (rate_of(near), rate_of(far))

    asyncio.run(scenario())


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_a_descriptor_that_is_no_connection_any_more_is_left_alone() -> None:
    reader, writer = os.pipe()
    before = open_files()
    pace_descriptor(reader)
    assert open_files() == before
    os.close(reader)
    os.close(writer)
    pace_descriptor(writer)
