"""Saying many frames to a member or a gateway, none of which cuts a peer off, and using the gateway afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from unittest.mock import patch

import zmq

from hetrl.runtime import wire
from hetrl.runtime.gateway.gateway import Gateway
from hetrl.runtime.transport.lane import now
from hetrl.runtime.transport.member import Member
from hetrl.runtime.transport.offences import Offences
from hetrl.workload import TASKS
from lab.hostile.ear import Ear

ROLES = (wire.CONTROLLER, wire.PROBE, wire.KEEPER, *TASKS, *(task + wire.RANK for task in TASKS))  # of every member
_SAVED = wire.Saved(step=1, directory="d", seconds=0.0, whole=True)


@contextmanager
def all_forgiven() -> Iterator[None]:
    """Let nobody be cut off, so that every frame is looked at."""
    add = Offences.add

    def forgive(offences: Offences, peer: str, what: object, *, forgiven: bool = False) -> None:
        add(offences, peer, what, forgiven=True)

    with patch.object(Offences, "add", forgive):
        yield


def feed_member(ear: Ear, messages: Iterable[Sequence[bytes]]) -> None:
    """Say messages to a member, and let its clock tick now and then."""
    for number, frames in enumerate(messages):
        ear.hear(frames)
        if number % 100 == 0:
            ear.exchange.tick(now())
            ear.exchange.settle()


async def feed_gateway(gateway: Gateway, origins: Sequence[str], messages: Iterable[Sequence[bytes]]) -> None:
    """Say messages to a gateway with the keys of these sites in turn, and let others work now and then."""
    for number, (origin, frames) in enumerate(zip(cycle(origins), messages, strict=False)):
        gateway.hear(origin, b"somebody", [zmq.Frame(frame) for frame in frames])
        if number % 1000 == 0:
            await asyncio.sleep(0)


async def connected(controller: Member, trainer: Member) -> None:
    """Wait until the gateway of two members hands on what one says to the other."""
    await trainer.send(controller.address, wire.Heartbeat())
    await controller.receive(20)


async def served(controller: Member, trainer: Member) -> bool:
    """Whether a request of a controller comes to its trainer, and the answer back."""
    question = wire.Save(step=1, version=1)
    asking = asyncio.create_task(
        controller.request(trainer.address, question, timeout_seconds=60, doing="after what nobody sends")
    )
    while (envelope := await trainer.receive(60)).message != question:
        continue
    await trainer.reply(envelope, _SAVED)
    return (await asking).message == _SAVED
