"""Runs over loopback for the tests of the transport: keys, endpoints, gateways, members, and a wire that can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from hetrl.describe.sites import SiteFile
from hetrl.runtime import wire
from hetrl.runtime.gateway import peer_link
from hetrl.runtime.gateway.gateway import Gateway
from hetrl.runtime.transport import channel
from hetrl.runtime.transport.member import Member
from hetrl.runtime.transport.sockets import client_socket
from hetrl.runtime.wire.authority import Authority
from hetrl.runtime.wire.header import Tagged
from hetrl.runtime.wire.keys import SiteKeys, make_run_keys
from launch.ports import free_ports, gateway_endpoints

SITES = ("alpha", "beta", "gamma")
CONTROLLER, TRAINER, CRITIC = "alpha/controller/0", "alpha/actor_training/0", "alpha/critic_training/0"
BETA, BETA_1, GAMMA = "beta/actor_generation/0", "beta/actor_generation/1", "gamma/actor_generation/2"
MEMBERS = frozenset((CONTROLLER, TRAINER, CRITIC, BETA, BETA_1, GAMMA))


class Anything:
    """The authority of a transport that is not asked who may say what."""

    def refusal(self, message: wire.Message, header: wire.Header, receiver: str) -> str | None:
        return None

    def answers(self, question: type[Tagged], message: wire.Message) -> bool:
        return True


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


class Run:
    """Three sites on loopback: keys, endpoints and the gateways that were started.

    `ways` replaces the endpoint by which one site reaches another: {("alpha", "beta"): "tcp://.."}. In `folder` each
    site has a directory of its own; without it there are no unix sockets.
    """

    def __init__(
        self,
        ways: Mapping[tuple[str, str], str],
        settings: Mapping[str, Any],
        folder: Path | None = None,
        authority: Authority | None = None,
    ) -> None:
        self._authority = authority or Anything()
        self.keys = make_run_keys(SITES)
        self.endpoints = gateway_endpoints([SiteFile(name=site) for site in SITES])
        self.gateways: dict[str, Gateway] = {}
        self._ways, self._settings = ways, settings
        self.directories = {site: folder and folder / site for site in SITES}
        for directory in filter(None, self.directories.values()):
            directory.mkdir(mode=0o700)
        self._serving: dict[str, asyncio.Task[None]] = {}

    def start(self, site: str) -> Gateway:
        peers = {peer: self._ways.get((site, peer), endpoint) for peer, endpoint in self.endpoints.items()}
        described: dict[str, Any] = {"directory": self.directories[site], **self._settings}
        gateway = Gateway(site, "run", self.endpoints[site], peers, self.keys[site], MEMBERS, **described)
        self.gateways[site] = gateway
        self._serving[site] = asyncio.create_task(gateway.serve())
        return gateway

    async def stop(self, site: str, *, for_good: bool = False) -> None:
        self.gateways[site].stop(for_good=for_good)
        await self._serving.pop(site)

    def ended(self, site: str) -> bool:
        """Whether a gateway ended by itself."""
        return self._serving[site].done()

    async def end_of(self, site: str) -> None:
        """Wait until a gateway ends by itself; raises what it ends with."""
        await self._serving.pop(site)

    async def stop_all(self) -> None:
        await asyncio.gather(*(self.stop(site) for site in list(self._serving)))

    def member(self, address: str) -> Member:
        site = wire.site_of(address)
        return Member(address, "run", self.endpoints[site], self.keys[site], self.directories[site], self._authority)

    def is_up(self, site: str, peer: str) -> bool:
        return self.gateways[site].stats().links[peer].round_trip_seconds is not None


@asynccontextmanager
async def running(
    *sites: str,
    ways: Mapping[tuple[str, str], str] | None = None,
    folder: Path | None = None,
    authority: Authority | None = None,
    hold_seconds: float = 20.0,
    **settings: Any,
) -> AsyncIterator[Run]:
    run = Run(ways or {}, {"hold_seconds": hold_seconds, **settings}, folder, authority)
    for site in sites or SITES:
        run.start(site)
    try:
        yield run
    finally:
        await run.stop_all()


@asynccontextmanager
async def members(run: Run, *addresses: str) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(run.member(address)) for address in addresses]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def answer(member: Member, message: wire.Message, times: int = 1) -> None:
    for _ in range(times):
        await member.reply(await member.receive(20), message)


async def stats(member: Member, site: str) -> wire.LinkStatsReply:
    reply = await member.request(f"{site}/gateway/0", wire.LinkStats(), timeout_seconds=20, doing="counters")
    assert isinstance(reply.message, wire.LinkStatsReply)
    return reply.message


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let losses be noticed soon."""
    monkeypatch.setattr(channel, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(channel, "LONGEST_STALL_SECONDS", 0.4)
    monkeypatch.setattr(peer_link, "ECHO_SECONDS", 0.1)


@asynccontextmanager
async def bare_socket(run: Run, keys: SiteKeys) -> AsyncIterator[zmq.Socket[bytes]]:
    """A socket that speaks to alpha's gateway without a member's manners."""
    context: zmq.Context[Any] = zmq.Context()
    bare = client_socket(context, keys, run.keys["alpha"].public)
    bare.connect(run.endpoints["alpha"])
    try:
        yield bare
    finally:
        bare.close(linger=0)
        context.term()


class Cable:
    """A TCP forwarder that can be cut, with every connection left open and silent, and mended; or snapped.

    All its connections share `bytes_per_second`.
    """

    def __init__(self, bytes_per_second: float = float("inf")) -> None:
        self._bytes_per_second, self._turn = bytes_per_second, asyncio.Lock()
        self.endpoint = free_endpoint()
        self.target = ""
        self.accepted = 0
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def strand(self) -> None:
        """Leave every connection of now open and silent for good; those made later carry."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def snap(self) -> None:
        """End every connection; whatever they held is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        await self._whole.wait()
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port_of(self.target))
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(2**18):
                await self._whole.wait()
                async with self._turn:
                    await asyncio.sleep(len(data) / self._bytes_per_second)
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        sink.transport.abort()

    @asynccontextmanager
    async def carrying(self) -> AsyncIterator[Cable]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._serve(reader, writer)
            except OSError:
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", port_of(self.endpoint))
        try:
            yield self
        finally:
            server.close()
            self.snap()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def cabled(bytes_per_second: float = float("inf"), **settings: Any) -> AsyncIterator[tuple[Run, Cable, Cable]]:
    """Alpha and beta, connected by a cable each way; yields that from alpha to beta and the one back, too."""
    async with AsyncExitStack() as stack:
        there, back = [await stack.enter_async_context(Cable(bytes_per_second).carrying()) for _ in range(2)]
        ways = {("alpha", "beta"): there.endpoint, ("beta", "alpha"): back.endpoint}
        run = await stack.enter_async_context(running("alpha", "beta", ways=ways, **settings))
        there.target, back.target = run.endpoints["beta"], run.endpoints["alpha"]
        await until(lambda: run.is_up("alpha", "beta"))
        yield run, there, back
