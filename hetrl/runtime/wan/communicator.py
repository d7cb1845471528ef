"""A group of ranks on several sites: who they are, and the life of its operations.

launch -> wait for its turn (`Turns`) -> work, with a deadline -> done
the first failure, here or told by another rank, ends every operation of the group and every later one
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property

from hetrl.runtime import wire
from hetrl.runtime.wan.endpoint import PROBE_SECONDS, Endpoint, GroupError
from hetrl.runtime.wan.island import Island, IslandError
from hetrl.runtime.wan.streams import Arrivals, Key


@dataclass(frozen=True)
class Placement:
    """The ranks of a group by site; a site's leader is its lowest rank."""

    addresses: tuple[str, ...]
    rank: int

    @cached_property
    def sites(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each site, sites in the order of their lowest rank."""
        ranks: dict[str, tuple[int, ...]] = {}
        for rank, address in enumerate(self.addresses):
            site = wire.site_of(address)
            ranks[site] = (*ranks.get(site, ()), rank)
        return ranks

    @property
    def local(self) -> tuple[int, ...]:
        """Return the ranks of this rank's site."""
        return self.sites[wire.site_of(self.addresses[self.rank])]

    @property
    def leaders(self) -> tuple[int, ...]:
        """Return the leader of each site."""
        return tuple(ranks[0] for ranks in self.sites.values())

    @property
    def leads(self) -> bool:
        """Whether this rank is its site's leader."""
        return self.rank == self.local[0]

    @property
    def other_leaders(self) -> tuple[str, ...]:
        """Return the addresses of the leaders of the other sites."""
        return tuple(self.addresses[rank] for rank in self.leaders if rank != self.local[0])


async def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of one operation; its key names what is sent in it, its title says what it is.

    `second_half` waits until the operation before is over, then lets the next one begin (`Turns`).
    """

    key: Key
    seconds: float
    title: str
    halves: bool = False
    second_half: Callable[[], Awaitable[None]] = _nothing

    def part(self, number: int) -> Operation:
        """Return the operation of one of several tensors."""
        return replace(self, key=replace(self.key, operation=f"{self.key.operation}.{number}"))


class Turns:
    """The collectives of a group in the order of their calls, one at a time, or one at a time in each of two halves.

    With halves, an operation sends while what the one before it has sent is still on its way: else a link is idle for
    a trip at each turn. Gloo's calls inside a site are matched by their order: those of `Island.reduce` belong into the
    first half and those of `Island.broadcast` into the second.
    """

    def __init__(self) -> None:
        self._first, self._second = asyncio.Lock(), asyncio.Lock()

    @asynccontextmanager
    async def turn(self, operation: Operation) -> AsyncIterator[Operation]:
        """Wait for the operation's turn, or for its first half; it is the next one's at the end of the block."""
        held: list[asyncio.Lock] = []

        async def take(lock: asyncio.Lock) -> None:
            await lock.acquire()
            held.append(lock)

        async def second_half() -> None:
            await take(self._second)  # before the first is let go: the next one comes behind, here too
            held.remove(self._first)
            self._first.release()

        try:
            await take(self._first)
            if not operation.halves:
                await take(self._second)
            yield replace(operation, second_half=second_half) if operation.halves else operation
        finally:
            for lock in held:
                lock.release()


class Communicator:
    """The operations of one group; methods are for the loop of its endpoint."""

    def __init__(self, name: str, placement: Placement, endpoint: Endpoint, island: Island | None) -> None:
        self.name, self.placement, self.endpoint, self.island = name, placement, endpoint, island
        self.addresses: Sequence[str] = placement.addresses
        self._turns = Turns()
        self._sequence = itertools.count()
        self._running: dict[Operation, asyncio.Task[None] | None] = {}  # None: it failed and looks for the cause
        self._cause: str | None = None
        self._failed = asyncio.Event()

    def under_way(self) -> tuple[str, ...]:
        """Return the operations under way, as in "all_reduce 7"."""
        return tuple(operation.title for operation in self._running)

    def operation(self, name: str, seconds: float, *, halves: bool = False) -> Operation:
        """Name the next collective; every rank calls them in the same order."""
        key = Key(self.name, name, next(self._sequence))
        return Operation(key, seconds, f"{name} {key.sequence}", halves)

    async def run(
        self, operation: Operation, work: Callable[[Operation], Awaitable[None]], *, in_turn: bool = True
    ) -> None:
        """Do the work of an operation; raises GroupError that names who is missing after `operation.seconds`."""
        if self._cause is not None:
            raise self._error(operation)
        self._running[operation] = asyncio.current_task()
        try:
            turn = self._turns.turn(operation) if in_turn else nullcontext(operation)
            async with asyncio.timeout(operation.seconds), turn as begun:
                await work(begun)
        except asyncio.CancelledError:
            raise self._error(operation) from None
        except Exception as error:
            self._running[operation] = None
            await self._give_up(operation, _first(error))
            raise self._error(operation) from error
        finally:
            del self._running[operation]

    def fail(self, cause: str, tell: bool) -> None:
        """End every operation with this cause, and `tell` the other ranks; the first cause stays."""
        if self._cause is None:
            self.endpoint.broken = True
            self._stop(cause, tell)

    def _stop(self, cause: str, tell: bool) -> None:
        self._cause = cause
        self._failed.set()
        if tell:
            others = [address for address in self.addresses if address != self.endpoint.address]
            self.endpoint.post(others, wire.WanFailed(group=self.name, cause=cause))
        for task in self._running.values():
            if task is not None:
                task.cancel()
        self.endpoint.drop(self.name)
        if self.island is not None:
            self.island.close()

    async def close(self) -> None:
        """End the group; what it still did fails."""
        if self._cause is None:
            self._stop("the group was destroyed", tell=False)
        self.endpoint.remove(self)

    def receive(self, key: Key, source: int, place: memoryview, dtype: str, pieces: Sequence[slice]) -> Arrivals:
        """Begin to receive the stream `key` of a rank, cut into `pieces`."""
        return self.begin(Arrivals(key, self.addresses[source], place, pieces, dtype))

    def begin(self, arrivals: Arrivals) -> Arrivals:
        """Begin to receive a stream, and return it."""
        if arrivals.size_bytes:
            self.endpoint.begin(arrivals)
        return arrivals

    def _error(self, operation: Operation) -> GroupError:
        return GroupError(
            f"wan: {operation.title} of group {self.name} at {self._place(self.placement.rank)}: {self._cause}"
        )

    async def _give_up(self, operation: Operation, error: BaseException) -> None:
        """Find out who is missing, and end the group."""
        what, missing = str(error), set[str]()
        if isinstance(error, TimeoutError):
            what, missing = f"nothing came for {operation.seconds:g} s", self.endpoint.awaited(self.name)
        ranks = [rank for rank, address in enumerate(self.addresses) if address in missing]
        if not ranks and isinstance(error, TimeoutError | IslandError):
            ranks = [rank for rank in self.placement.local if rank != self.placement.rank]
        told = await self._verdict(operation, ranks)
        self.fail("; ".join([what, *told]) + f" ({operation.title} at {self._place(self.placement.rank)})", tell=True)

    async def _verdict(self, operation: Operation, ranks: Sequence[int]) -> list[str]:
        """Name those to blame among ranks that are waited for: who is dead, else who does something else, else all.

        The weaker the ground, the longer another rank has to come up with a better one.
        """
        doing = dict(zip(ranks, await asyncio.gather(*map(self._probe, ranks)), strict=True))
        dead = [rank for rank in ranks if doing[rank] is None]
        elsewhere = [rank for rank in ranks if operation.title not in (doing[rank] or ())]
        blamed = dead or elsewhere or ranks
        patience_seconds = 0 if dead else PROBE_SECONDS if elsewhere else 2 * PROBE_SECONDS
        if ranks and patience_seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_seconds):
                    await self._failed.wait()
        if dead:
            return [f"{self._place(rank)} does not answer, look into its log" for rank in blamed]
        return [
            f"{self._place(rank)} lives and is in {', '.join(doing[rank] or ()) or 'no operation of this group'}"
            for rank in blamed
        ]

    async def _probe(self, rank: int) -> tuple[str, ...] | None:
        return await self.endpoint.probe(self.addresses[rank], self.name)

    def _place(self, rank: int) -> str:
        address = self.addresses[rank]
        return f"rank {rank} ({address}, site {wire.site_of(address)})"


def _first(error: BaseException) -> BaseException:
    """Return the first failure among those of concurrent tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
