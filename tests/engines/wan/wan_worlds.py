"""Worlds on several sites of this machine: gateways in a thread of the test, ranks in the processes of `Worlds`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hetrl.describe.sites import SiteFile
from hetrl.runtime import wire
from hetrl.runtime.gateway.gateway import Gateway
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wan.torch_world import start_world
from hetrl.runtime.wan.world import start_wan_world, stop_wan_world
from hetrl.runtime.wire.keys import SiteKeys, make_run_keys
from launch.ports import gateway_endpoints
from tests.engines.megatron.megatron_worlds import Job, Worlds, let_go_later, store_at

LAYOUTS = {
    "2x1": ("alpha/actor_training.rank/0", "beta/actor_training.rank/0"),
    "2x2": (
        "alpha/actor_training.rank/0",
        "beta/actor_training.rank/0",
        "beta/actor_training.rank/1",
        "alpha/actor_training.rank/1",
    ),
    "3x1": ("alpha/actor_training.rank/0", "beta/actor_training.rank/0", "gamma/actor_training.rank/0"),
    "2+1+1": (
        "alpha/actor_training.rank/0",
        "beta/actor_training.rank/0",
        "alpha/actor_training.rank/1",
        "gamma/actor_training.rank/0",
    ),
}

CONTROLLER = "alpha/controller/0"


@dataclass(frozen=True)
class Sites:
    """What the ranks of a world need to know to meet; `backend` gloo is the world to compare with."""

    ranks: tuple[str, ...]
    backend: str
    keys: dict[str, SiteKeys] = field(default_factory=dict)
    gateways: dict[str, str] = field(default_factory=dict)

    def member(self, address: str) -> Member:
        site = wire.site_of(address)
        return Member(address, "run", self.gateways[site], self.keys[site])

    def join(self, rank: int, port: int, seconds: float = 60.0) -> None:
        if self.backend == "gloo":
            start_world(rank, len(self.ranks), store_at(rank, port), seconds, "cpu")
            return
        start_wan_world(self.member(self.ranks[rank]), self.ranks, rank, timeout_seconds=seconds)


def engine_over(sites: Sites, rank: int, port: int, job: Job) -> Any:
    """Join the world of a job and build its engine."""
    from hetrl.runtime.megatron.engine import MegatronEngine

    sites.join(rank, port)
    engine = MegatronEngine(
        job.config, job.layout, rank=rank, dtype=job.dtype, optimizer=job.optimizer, seed=0, timeout_seconds=60.0
    )
    return let_go_later(engine)


@contextmanager
def sites_of(ranks: tuple[str, ...], backend: str = "wan", crossed: dict[str, int] | None = None) -> Iterator[Sites]:
    """Start a gateway per site; in the end `crossed` gets the bytes that went over each link, as `from-to`."""
    names = tuple(dict.fromkeys(wire.site_of(rank) for rank in ranks))
    if backend == "gloo":
        yield Sites(ranks, backend)
        return
    endpoints = gateway_endpoints([SiteFile(name=name) for name in names])
    sites = Sites(ranks, backend, make_run_keys(names), endpoints)
    known = (*ranks, CONTROLLER)
    gateways = [Gateway(name, "run", endpoints[name], endpoints, sites.keys[name], known) for name in names]
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        await asyncio.gather(*(gateway.serve() for gateway in gateways))

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield sites
    finally:
        for gateway in gateways:
            loop.call_soon_threadsafe(gateway.stop)
        thread.join()
        if crossed is not None:
            links = {(gateway.site, peer): link for gateway in gateways for peer, link in gateway.stats().links.items()}
            crossed |= {f"{here}-{there}": link.bytes_sent for (here, there), link in links.items()}
        loop.close()


def leftovers() -> list[str]:
    """Return the threads of a world that this process still has."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wan ")]


def run_sites(
    worlds: Worlds,
    layout: str,
    backend: str,
    work: Callable[[int, int], Any],
    crossed: dict[str, int] | None = None,
) -> list[Any]:
    """Return what `work(rank, size)` returns on each rank of a world of this layout."""
    with sites_of(LAYOUTS[layout], backend, crossed) as sites:
        return worlds.run(_rank, len(sites.ranks), (sites, work))


def _rank(rank: int, port: int, argument: tuple[Sites, Callable[[int, int], Any]]) -> Any:
    sites, work = argument
    sites.join(rank, port)
    try:
        return work(rank, len(sites.ranks))
    finally:
        stop_wan_world()
