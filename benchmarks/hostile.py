"""A gateway and members of every role hear millions of frames that nobody of a run sends.

for each seed: every message from every role, right, wrong or garbled; half of them to a gateway, half to members
an exception that leaves one of them ends the bench; so does a member that its gateway does not serve afterwards

Nobody is cut off here, so that every frame is looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass

import psutil
from _results import ROOT, write_result

sys.path.insert(0, str(ROOT))  # for the lab

from hetrl.runtime import wire
from hetrl.runtime.gateway.gateway import Gateway
from hetrl.runtime.transport.member import Member
from hetrl.runtime.transport.rendezvous import free_port
from hetrl.runtime.wire.keys import make_run_keys
from lab.hostile.ear import RUN, Ear
from lab.hostile.feeding import ROLES, all_forgiven, connected, feed_gateway, feed_member, served
from lab.hostile.fuzzer import Fuzzer

SITES = ("alpha", "beta", "gamma")
CONTROLLER, TRAINER = "alpha/controller/0", "alpha/actor_training/0"
MEMBERS = [wire.address(site, role) for site in SITES for role in ROLES]
STRANGERS = ["beta/gateway/0", "gamma/gateway/0", "beta/invented/0", "delta/controller/0"]
LANE_BYTES = 2**20


@dataclass(frozen=True)
class Heard:
    """What came of the frames of one seed at one kind of receiver; `grown_mib`: by how much the process grew."""

    who: str
    seed: int
    frames: int
    refused: int
    seconds: float
    grown_mib: float


def members_hear(seed: int, frames: int) -> Heard:
    """Say so many frames to members of all roles."""

    async def scenario() -> int:
        refused = 0
        for number, role in enumerate(ROLES):
            ear = Ear(wire.address("alpha", role))
            fuzzer = Fuzzer(RUN, (*MEMBERS, *STRANGERS), (ear.address, ear.address, TRAINER))
            feed_member(ear, fuzzer.frames(seed * len(ROLES) + number, frames // len(ROLES)))
            refused += ear.offences.total
        return refused

    return _measured("members", seed, frames // len(ROLES) * len(ROLES), scenario)


def gateway_hears(seed: int, frames: int) -> Heard:
    """Say so many frames to alpha's gateway with the keys of the other sites, then use it."""

    async def scenario() -> int:
        keys, endpoint = make_run_keys(SITES), _free_endpoint()
        peers = {site: _free_endpoint() for site in SITES[1:]}
        gateway = Gateway("alpha", RUN, endpoint, peers, keys["alpha"], frozenset(MEMBERS), lane_bytes=LANE_BYTES)
        serving = asyncio.create_task(gateway.serve())
        fuzzer = Fuzzer(RUN, (*MEMBERS, *STRANGERS), (*MEMBERS, *STRANGERS, "alpha/gateway/0"))
        ends = [Member(address, RUN, endpoint, keys["alpha"]) for address in (CONTROLLER, TRAINER)]
        async with ends[0] as controller, ends[1] as trainer:
            await connected(controller, trainer)
            await feed_gateway(gateway, SITES[1:], fuzzer.frames(seed, frames))
            assert await served(controller, trainer)
        gateway.stop()
        await serving
        return gateway.stats().malformed

    return _measured("gateway", seed, frames, scenario)


def _measured(who: str, seed: int, frames: int, scenario: Callable[[], Coroutine[None, None, int]]) -> Heard:
    process = psutil.Process()
    before, start = process.memory_info().rss, time.monotonic()
    refused = asyncio.run(scenario())
    grown = (process.memory_info().rss - before) / 2**20
    return Heard(who, seed, frames, refused, round(time.monotonic() - start, 2), round(grown, 1))


def _free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port('127.0.0.1')}"


def main() -> None:
    """Run all seeds, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--frames", type=int, default=1_000_000, help="of each seed")
    arguments = parser.parse_args()
    logging.disable()  # each member tells what it refused, and here that is most
    heard = []
    with all_forgiven():
        for seed in arguments.seeds:
            for say in (gateway_hears, members_hear):
                heard.append(say(seed, arguments.frames // 2))
                print(heard[-1], flush=True)
    lines = [
        f"| {one.who} | {one.seed} | {one.frames:,} | {one.refused / one.frames:.0%} "
        f"| {one.seconds / one.frames * 1e6:.0f} | {one.grown_mib:.0f} |"
        for one in heard
    ]
    table = "\n".join(
        [
            "Frames that nobody of a run sends, into a gateway and into members of every role: none of them ended, and "
            "the gateway served its members afterwards. Refused: dropped and counted, the others may be said. Time "
            "includes making the frames; grown: by how much the process did.",
            "",
            "| who | seed | frames | refused | us per frame | grown, MiB |",
            "| --- | --- | --- | --- | --- | --- |",
            *lines,
        ]
    )
    write_result("hostile", {"heard": [asdict(one) for one in heard]}, table)
    print(table)


if __name__ == "__main__":
    main()
