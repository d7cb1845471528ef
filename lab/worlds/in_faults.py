"""Worlds of three ranks, one per site, that are somewhere in a training when a fault comes.

    python -m lab.worlds.in_faults SITE    one per site, in the network of its node; forks a process per member

A cell is a parallelism and what its middle rank, the victim, does at that moment:

                data parallel                       pipeline
    sends       broadcasts to the others            sends to the next stage
    receives    takes a broadcast of the first      receives from the stage before
    computes    the others are in an all_reduce     both neighbours wait for it

Each line on stdin is a cell and the directory of the run that it is of. What members say goes to stdout: the run, the
cell, the member, its process, and a word.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.rl.turns import Turns
from hetrl.runtime.run.membership import Membership
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wan.world import start_wan_world, stop_wan_world
from hetrl.runtime.wire.keys import read_keys
from hetrl.workload import ACTOR_TRAINING
from lab.worlds.gateways import SITES

CELLS = tuple(product(("data", "pipeline"), ("sends", "receives", "computes")))
VICTIM = 1  # the rank, at the second site, which is the middle stage
GO, COMPUTED = "go", "computed"  # files of the run's directory
LARGE = 8_000_000  # numbers: seconds over a link of 20 Mbps
MEETING_SECONDS, OPERATION_SECONDS, LOOK_SECONDS = 60.0, 600.0, 0.05


@dataclass(frozen=True)
class World:
    """The members of one cell in a run."""

    cell: int
    run: Path

    @property
    def ranks(self) -> tuple[str, ...]:
        """Return the addresses of the ranks, one per site."""
        return tuple(wire.address(site, ACTOR_TRAINING + wire.RANK, self.cell) for site in SITES)

    @property
    def lead(self) -> str:
        """Return the member that speaks for the world."""
        return wire.address(SITES[0], ACTOR_TRAINING, self.cell)

    @property
    def controller(self) -> str:
        """Return who watches the ranks."""
        return wire.address(SITES[0], wire.CONTROLLER, self.cell)

    @property
    def members(self) -> tuple[str, ...]:
        """Return all of them."""
        return (*self.ranks, self.lead, self.controller)

    def member(self, address: str) -> Member:
        """Return one of them, at a gateway of `lab.worlds.gateways`."""
        folder = self.run / wire.site_of(address)
        gateway = json.loads((folder / "gateway.json").read_text())["bind"]
        return Member(address, "run", gateway, read_keys(folder / "keys.json"), folder)

    def done(self, rank: str) -> Path:
        """Return the file that says that a rank is through, and may leave."""
        return self.run / f"{rank.replace('/', '.')}.done"

    def say(self, who: str, word: str) -> None:
        """Tell the test; a line this short is written as a whole."""
        os.write(1, (json.dumps([str(self.run), self.cell, who, os.getpid(), word]) + "\n").encode())


def worlds_of(run: Path) -> tuple[World, ...]:
    """Return the world of every cell."""
    return tuple(World(cell, run) for cell in range(len(CELLS)))


def train(world: World, rank: int) -> None:
    """Be a rank: meet the others, begin what the cell is about, then pass a barrier."""
    here, (parallelism, victim) = world.ranks[rank], CELLS[world.cell]
    work = in_pipeline if parallelism == "pipeline" else in_data_parallel
    meeting = {"timeout_seconds": MEETING_SECONDS, "collective_seconds": OPERATION_SECONDS}
    start_wan_world(world.member(here), world.ranks, rank, **meeting, watcher=world.controller)
    try:
        world.say(here, "ready")
        until((world.run / GO).exists)
        world.say(here, "begins")
        work(victim, rank, lambda: until((world.run / COMPUTED).exists))
        dist.barrier()
        world.done(here).touch()
        world.say(here, "done")
    except HetrlError as error:
        world.say(here, str(error))
    finally:
        stop_wan_world()


def in_data_parallel(victim: str, rank: int, compute: Callable[[], None]) -> None:
    """Do one collective of a training over replicas."""
    tensor = torch.ones(LARGE)
    if victim == "computes":
        if rank == VICTIM:
            compute()
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, VICTIM if victim == "sends" else 0)


def in_pipeline(victim: str, rank: int, compute: Callable[[], None]) -> None:
    """Pass one micro-batch down and its gradient up; what the cell is not about is small."""
    activations = [torch.ones(LARGE if victim == hop else 1) for hop in ("receives", "sends")]  # by hop
    if rank > 0:
        dist.recv(activations[rank - 1], rank - 1)
    if rank == VICTIM and victim == "computes":
        compute()
    if rank < len(activations):
        dist.send(activations[rank], rank + 1)
        dist.recv(torch.empty(1), rank + 1)
    if rank > 0:
        dist.send(torch.ones(1), rank - 1)


async def control(world: World) -> None:
    """Watch the ranks as the controller of a run does, and end it at all of them with the cause."""
    async with world.member(world.controller) as member, world.member(world.lead) as lead:
        world.say(world.controller, "ready")
        await lead.send(world.controller, wire.Join(ranks=len(SITES), host="", pid=0, engines={}))
        lead.start_heartbeat(world.controller)
        membership = Membership(member, [world.lead], lambda *_: None, world.ranks)
        await membership.gather(MEETING_SECONDS, MEETING_SECONDS, Turns(member, (), new_weights=True))
        try:
            await membership.watch(lambda rank, _: world.done(rank).exists())
        except HetrlError as error:
            await member.send((world.lead, *world.ranks), wire.Abort(cause=str(error)))


def until(true: Callable[[], bool]) -> None:
    """Wait for the test, which ends this process where it does not go on."""
    while not true():
        time.sleep(LOOK_SECONDS)


def fork(work: Callable[[], None]) -> None:
    """Run something in a process of its own."""
    if os.fork() == 0:
        try:
            work()
        finally:
            os._exit(0)


def main() -> None:
    """Start the members of a site as stdin says."""
    site = sys.argv[1]
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        cell, run = json.loads(line)
        world = World(cell, Path(run))
        if site == SITES[0]:
            fork(lambda world=world: asyncio.run(control(world)))
        fork(lambda world=world: train(world, SITES.index(site)))


if __name__ == "__main__":
    main()
