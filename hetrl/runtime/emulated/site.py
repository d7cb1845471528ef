"""All members of a site in one process: `python -m hetrl.runtime.emulated.site SITE_DIRECTORY`.

Each generation replica, each world and each rank of a world that the plan has at the site is a member of the run of its
own, at the address and with the messages that a process with a real engine would have.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from hetrl.cost.generation import batch_limit, server_of
from hetrl.cost.stages import place_all
from hetrl.runtime import wire
from hetrl.runtime.checkpoints.places import places_of
from hetrl.runtime.emulated import play
from hetrl.runtime.emulated.costs import read_costs
from hetrl.runtime.emulated.ranks import EmulatedRank
from hetrl.runtime.emulated.server import EmulatedIdle, EmulatedServer, Replica
from hetrl.runtime.emulated.travels import Travels
from hetrl.runtime.emulated.world import Emulated, EmulatedWorld
from hetrl.runtime.run.context import (
    GENERATION,
    WORD_SECONDS,
    Context,
    log_to_stderr,
    run_members,
)
from hetrl.runtime.run.rollout import scratch_of, serve
from hetrl.runtime.side_by_side import beside
from hetrl.runtime.transport.member import Member
from hetrl.runtime.weights.intake import Intake
from hetrl.runtime.weights.model_directory import ensure_model_directory
from hetrl.runtime.weights.weight_file import WeightFile, most_bytes
from hetrl.runtime.wire.members import World
from hetrl.workload import ACTOR_TRAINING


async def serve_site(context: Context) -> None:
    """Be every member of a site until the run ends."""
    model = read_costs(context.directory)
    shared = Emulated(context, model, Travels(context.plan, model))
    async with asyncio.TaskGroup() as members:
        for number, address in enumerate(context.replicas):
            if wire.site_of(address) == context.site:
                members.create_task(_replica(shared, number))
        for world, rank in _ranks(context):
            members.create_task(_lead(shared, world) if rank == world.first else _follow(context, world, rank))


def _ranks(context: Context) -> Iterator[tuple[World, int]]:
    """Yield every rank of a world at this site, counted through all worlds of its task."""
    for task in context.plan.tasks:
        for world in context.worlds(task) if task != GENERATION else ():
            for rank, address in enumerate(world.ranks, world.first):
                if wire.site_of(address) == context.site:
                    yield world, rank


# ---- generation


async def _replica(shared: Emulated, number: int) -> None:
    context = shared.context
    pace = shared.pace(wire.address(context.site, GENERATION, number))
    server = EmulatedServer(_server_of(shared, number), pace)
    switch = play.switch_seconds(GENERATION, context.plan.tasks[GENERATION], shared.model)
    async with context.joined(GENERATION, number) as member:
        turn = await context.first_turn(member, GENERATION)
        size = int(shared.weight_bytes(ACTOR_TRAINING))
        served = serve(context, number, member, turn, server, EmulatedIdle(server, pace, switch), size)
        await beside(served, server.run())


def _server_of(shared: Emulated, number: int) -> Replica:
    context, model = shared.context, shared.model
    planned = context.plan.tasks[GENERATION].replicas[number]
    (placed,) = place_all(GENERATION, [planned], model)
    stages = server_of(placed)
    scratch = scratch_of(context, number) / "model"
    directory = ensure_model_directory(context.experiment.model, context.architecture, scratch)
    filler = next(t for t in range(int(directory.config["vocab_size"]) - 1, -1, -1) if t not in directory.stop_tokens)
    load = play.load_seconds(context.plan, "actor", model)[number]
    limit, each = batch_limit(stages, planned, model.workload), context.experiment.launch.emulation.tokens_each
    return Replica(stages, limit, load, model.workload.response, filler, each)


# ---- worlds


async def _lead(shared: Emulated, world: World) -> None:
    """Be rank 0 of a world, at both of its addresses."""
    context = shared.context
    async with context.joined(world.task, world.number) as member, _rank_member(context, world, world.first) as other:
        rank = EmulatedRank(other, world)
        turn = await context.first_turn(member, world.task)
        ready = wire.Join(
            ranks=len(world.ranks), host=socket.gethostname(), pid=os.getpid(), engines={"training": "emulated"}
        )
        await member.send(context.controller, ready)
        if turn is not None:
            await member.reply(turn, wire.Done())
        places = places_of(world.task, context.continues)
        with context.versions_of(world) as directory:
            weights = Intake(WeightFile(directory, most_bytes(context.architecture)))
            served = EmulatedWorld(member, rank, world, shared, weights, places).serve()
            await beside(served, rank.serve(), rank.keep_alive(WORD_SECONDS))


async def _follow(context: Context, world: World, rank: int) -> None:
    """Be one of the other ranks of a world."""
    async with _rank_member(context, world, rank) as member:
        await EmulatedRank(member, world).serve()


@asynccontextmanager
async def _rank_member(context: Context, world: World, rank: int) -> AsyncIterator[Member]:
    """Connect the member at which a rank meets the others; it says to the controller that it lives."""
    launch = context.experiment.launch
    async with context.member(world.task + wire.RANK, rank) as member:
        member.start_heartbeat(lambda: (context.controller,))
        if rank != world.first:
            orphan_seconds = launch.orphan_timeout_seconds
            member.expect_word_of(world.ranks[0], orphan_seconds, launch.start_seconds + orphan_seconds)
        yield member


def main() -> int:
    """Run the members of one site."""
    parser = argparse.ArgumentParser(prog="python -m hetrl.runtime.emulated.site")
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    log_to_stderr()
    return run_members(arguments.directory, serve_site)


if __name__ == "__main__":
    sys.exit(main())
