"""The ranks of an emulated world: each says that it lives, and one per site sends what crosses links.

rank 0          -> a rank at site a: MOVE, so many bytes to the rank at site b
that rank       -> the rank at b: PIECE, ...     which answers READY to the last one
that rank       -> rank 0: READY
rank 0          -> all: WORD, now and then, so that nobody outlives it for long; END
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping

from hetrl.errors import HetrlError
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Envelope, Member
from hetrl.runtime.weights.pieces import PIECE_BYTES
from hetrl.runtime.wire.members import World

MOVE, PIECE, WORD, END = "emulated move", "emulated piece", "emulated word", "emulated end"


class EmulatedRank:
    """One rank, at the address where its world meets."""

    def __init__(self, member: Member, world: World) -> None:
        self._member, self._world = member, world
        self._numbers = itertools.count()
        self._waits: dict[int, asyncio.Event] = {}
        # The rank of each site that sends and receives, and the first rank of all.
        self._mouths = {wire.site_of(rank): rank for rank in reversed(world.ranks)}
        self._first, self._others = world.ranks[0], world.ranks[1:]

    async def serve(self) -> None:
        """Do what the other ranks ask, until rank 0 says that it is over."""
        async with asyncio.TaskGroup() as moves:
            while True:
                envelope = await self._member.receive()
                match envelope.message:
                    case wire.WanPiece(operation=operation) if operation == END:
                        return
                    case wire.WanPiece(operation=operation) if operation == MOVE:
                        moves.create_task(self._ordered(envelope))
                    case wire.WanPiece(sequence=sequence, tag=last) if last:
                        await self._ready(envelope.header.source, sequence)
                    case wire.WanReady(sequence=sequence) if sequence in self._waits:
                        self._waits.pop(sequence).set()

    async def keep_alive(self, every_seconds: float) -> None:
        """Let the other ranks know, for as long as this is not cancelled, that rank 0 lives."""
        while self._others:
            await self._member.send(self._others, self._piece(WORD, 0))
            await asyncio.sleep(every_seconds)

    async def cross(self, carried: Mapping[tuple[str, str], float]) -> None:
        """Let so many bytes cross from site to site, and wait until they have; rank 0 asks for it."""
        await asyncio.gather(*(self._cross(*link, int(size)) for link, size in carried.items() if size >= 1))

    async def end(self) -> None:
        """Tell all other ranks that it is over."""
        if self._others:
            await self._member.send(self._others, self._piece(END, 0))

    async def _cross(self, source: str, target: str, size: int) -> None:
        if self._mouths[source] == self._first:
            await self._move(self._mouths[target], size)
            return
        number, arrived = self._expect()
        order = json.dumps({"to": self._mouths[target], "bytes": size}).encode()
        await self._member.send(self._mouths[source], self._piece(MOVE, number, len(order)), [order])
        await self._wait(arrived, self._mouths[source])

    async def _ordered(self, envelope: Envelope) -> None:
        order, message = json.loads(bytes(envelope.buffers[0])), envelope.message
        assert isinstance(message, wire.WanPiece)
        await self._move(order["to"], order["bytes"])
        await self._ready(envelope.header.source, message.sequence)

    async def _move(self, to: str, size: int) -> None:
        number, arrived = self._expect()
        for start in range(0, size, PIECE_BYTES):
            part, last = min(PIECE_BYTES, size - start), start + PIECE_BYTES >= size
            await self._member.send(to, self._piece(PIECE, number, part, last=last), [bytes(part)])
        await self._wait(arrived, to)

    def _expect(self) -> tuple[int, asyncio.Event]:
        number = next(self._numbers)
        self._waits[number] = asyncio.Event()
        return number, self._waits[number]

    async def _wait(self, arrived: asyncio.Event, who: str) -> None:
        try:
            async with asyncio.timeout(wire.WORK_SECONDS):
                await arrived.wait()
        except TimeoutError:
            limit = f"within {wire.WORK_SECONDS:g} s"
            raise HetrlError(f"{wire.site_of(who)}: {who} did not move what it was to move {limit}") from None

    async def _ready(self, to: str, number: int) -> None:
        ready = wire.WanReady(group=self._world.task, operation=PIECE, sequence=number, tag=0)
        await self._member.send(to, ready)

    def _piece(self, operation: str, number: int, size: int = 0, *, last: bool = False) -> wire.WanPiece:
        return wire.WanPiece(
            group=self._world.task,
            operation=operation,
            sequence=number,
            tag=int(last),
            number=0,
            size_bytes=size,
            dtype="uint8",
        )
