"""Measure what lies between two nodes of a site, into nodes.json: `srun --nodes=2 python -m ...probe_nodes`.

The two ranks find each other as an island's ranks do. Where srun prepared MPI they measure by MPI, on the fabric that
it uses; else by TCP connections, one per stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

from hetrl.describe.measured_links import Probed, Throughput
from hetrl.errors import HetrlError, SiteUnreachableError, UsageError
from hetrl.files import replace_json
from hetrl.runtime.gateway import tcp
from hetrl.runtime.instruments.island import IslandRank, island_from_environment, started_by_mpi
from hetrl.runtime.instruments.load import INTERVALS, WARM_UP_ROUND_TRIPS, Send, full_load, gbps_of, round_trips
from hetrl.runtime.run.context import exit_with, log_to_stderr

NODES_FILE = "nodes.json"
MOST_SECONDS = 600.0
MEET_SECONDS = 60.0  # for rank 0 to listen
MPI_MESSAGE_BYTES = 2**22
_LENGTH = struct.Struct("!Q")
_ANSWER = b"."


# ---- TCP: rank 0 answers each message by a byte, rank 1 measures


async def serve(island: IslandRank) -> None:
    """Answer messages until the other rank, which came, has gone."""
    came, opened = asyncio.Event(), set[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.add(writer)
        came.set()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (left,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                while left:
                    got = len(await reader.read(min(left, 2**20)))
                    if not got:
                        break
                    left -= got
                writer.write(_ANSWER)
        opened.discard(writer)
        writer.close()

    server = await asyncio.start_server(answer, island.host, island.port, limit=2**20)
    async with server, asyncio.timeout(MOST_SECONDS):
        await came.wait()
        while opened:
            await asyncio.sleep(0.05)


class NodeConnection:
    """One TCP connection: messages go out one after the other, their answers come back in that order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take over an open connection."""
        self._reader, self._writer = reader, writer
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._listening = asyncio.create_task(self._listen())

    async def send(self, payload: bytes) -> None:
        """Send a message and return when it is answered; raises SiteUnreachableError where the other end is gone."""
        answered = asyncio.get_running_loop().create_future()
        self._waiting.append(answered)
        self._writer.write(_LENGTH.pack(len(payload)))
        self._writer.write(payload)
        await answered

    async def _listen(self) -> None:
        while answers := await self._reader.read(2**10):
            for _ in answers:
                self._waiting.popleft().set_result(None)
        for answered in self._waiting:
            answered.set_exception(SiteUnreachableError("the other node closed the connection; see its log"))

    def close(self) -> None:
        """Close the connection."""
        self._listening.cancel()
        self._writer.close()


async def connect(island: IslandRank, streams: int) -> list[NodeConnection]:
    """Open connections to rank 0; raises SiteUnreachableError where it does not listen in time."""
    deadline = time.monotonic() + MEET_SECONDS
    found: list[NodeConnection] = []
    while len(found) < streams:
        try:
            opened = await tcp.connect(f"{island.host}:{island.port}")
        except SiteUnreachableError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
            continue
        found.append(NodeConnection(*await asyncio.open_connection(sock=opened)))
    return found


async def measure_by_tcp(
    island: IslandRank, streams: list[int], seconds: float, count: int
) -> tuple[tuple[float, ...], list[Throughput]]:
    """Return the round trips in seconds, and the throughput of each number of streams."""
    connections = await connect(island, max(streams))
    trips = await round_trips(lambda: connections[0].send(b""), count)
    found = []
    for number in streams:
        load = await full_load(_by_turns(connections[:number]), seconds, trips)
        found.append(Throughput(number, load.interval_seconds, gbps_of(load.interval_bytes, load.interval_seconds)))
    for connection in connections:
        connection.close()
    return trips, found


def _by_turns(connections: list[NodeConnection]) -> Send:
    """Return what sends each message over the next connection."""
    turns = cycle(connections)
    return lambda payload: next(turns).send(payload)


# ---- MPI


def measure_by_mpi(world: Any, seconds: float, count: int) -> tuple[tuple[float, ...], list[Throughput]]:
    """Return the round trips in seconds, and the throughput from rank 1 to rank 0 (collective)."""
    one, message, go_on = bytearray(1), bytearray(MPI_MESSAGE_BYTES), bytearray(b"\1")
    trips, sent = [], [0] * INTERVALS
    if world.Get_rank() == 0:
        for _ in range(WARM_UP_ROUND_TRIPS + count):
            world.Recv(one, source=1)
            world.Send(one, dest=1)
        while go_on[0]:
            world.Recv(message, source=1)
            world.Send(one, dest=1)
            world.Recv(go_on, source=1)
        return (), []
    for _ in range(WARM_UP_ROUND_TRIPS + count):
        began = time.perf_counter()
        world.Send(one, dest=0)
        world.Recv(one, source=0)
        trips.append(time.perf_counter() - began)
    began, interval_seconds = time.perf_counter(), seconds / INTERVALS
    while go_on[0]:
        world.Send(message, dest=0)
        world.Recv(one, source=0)
        interval = int((time.perf_counter() - began) // interval_seconds)
        if interval < INTERVALS:
            sent[interval] += len(message)
        go_on[0] = interval < INTERVALS
        world.Send(go_on, dest=0)
    throughput = Throughput(1, interval_seconds, gbps_of(sent, interval_seconds))
    return tuple(trips[WARM_UP_ROUND_TRIPS:]), [throughput]


# ---- the process


def measure(options: argparse.Namespace, directory: Path) -> Probed | None:
    """Measure between the two ranks of this step; the second returns what was found.

    Raises UsageError where the step has another number of ranks.
    """
    by_mpi = started_by_mpi(os.environ)
    island = island_from_environment(os.environ, directory, options.interface)
    if island.size != 2 or island.local_rank != 0:
        raise UsageError(f"needs two ranks on two nodes, found rank {island.rank} of {island.size}; use srun --nodes=2")
    if by_mpi:
        from mpi4py import MPI

        trips, found = measure_by_mpi(MPI.COMM_WORLD, options.seconds, options.round_trips)
    elif island.rank == 0:
        asyncio.run(serve(island))
        return None
    else:
        trips, found = asyncio.run(measure_by_tcp(island, options.streams, options.seconds, options.round_trips))
    if island.rank == 0:
        return None
    round_trip_ms = tuple(1e3 * seconds for seconds in trips)
    return Probed(options.site, options.site, "mpi" if by_mpi else "sockets", round_trip_ms, tuple(found))


def main() -> int:
    """Measure, and write the file from the rank that measured; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.instruments.probe_nodes", description=main.__doc__)
    parser.add_argument("--site", required=True)
    parser.add_argument("--interface", help="network interface of the nodes (default: that of their names)")
    parser.add_argument("--streams", type=int, action="append", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--round-trips", type=int, required=True)
    options = parser.parse_args()
    log_to_stderr()
    try:
        found = measure(options, Path.cwd())
    except HetrlError as error:
        return exit_with(error)
    if found is not None:
        replace_json(Path(NODES_FILE), asdict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
