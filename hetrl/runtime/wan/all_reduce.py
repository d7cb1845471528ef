"""The all_reduce of a group on several sites: up inside each site, across, down inside each site.

up        gloo sums each segment onto the leader of its site
across    two sites, or a small tensor: every leader sends its sum to the others, each adds all in site order
          more sites: segment i goes round from site to site, each adds its own, until site i mod n has the total and
          sends it to the others; each uplink carries 2 (n-1)/n of the tensor, as in a ring
          (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69, 2009)
down      the leader passes each segment of the total on

The three overlap: while one segment crosses, the next is summed and the one before is passed on. Every element is
summed in an order that depends on the group and the size only, and once, so that all ranks hold the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from hetrl.runtime.wan.coded import receive_sums, send_sums
from hetrl.runtime.wan.communicator import Communicator, Operation
from hetrl.runtime.wan.streams import Arrivals, cuts

# Up to here one trip, in which (s - 1) n bytes leave each of s sites, beats the s trips of 2 (s - 1) / s n bytes: the
# sizes are even at s / (s - 2) times what a link holds on its way, 1.5 MB of three sites at 100 Mbps and 40 ms.
SMALL_BYTES = 2**20
_SUM, _TOTAL = 0, 1  # tags of the streams

# How two tensors become one under each reduction; an average is a sum first.
COMBINE: dict[Any, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
REDUCTIONS = tuple(COMBINE)


async def all_reduce(group: Communicator, operation: Operation, total: torch.Tensor, reduction: Any) -> None:
    """Reduce a flat tensor in place over all ranks; `reduction` is one of `REDUCTIONS`."""
    sites = len(group.placement.sites)
    kind = _Exchange if sites == 2 or total.nbytes <= SMALL_BYTES else _Round
    if total.numel():
        await kind(group, operation, total, reduction).run()


class _AllReduce:
    """What both ways across share: `partial` holds this site's sum by segment, `total` becomes that of all."""

    def __init__(self, group: Communicator, operation: Operation, total: torch.Tensor, reduction: Any) -> None:
        self.group, self.key = group, operation.key
        self.total = total
        self.partial: list[torch.Tensor] = []
        self.begun = asyncio.Event()
        self.average = reduction == dist.ReduceOp.AVG
        self.inside = dist.ReduceOp.SUM if self.average else reduction  # what gloo does
        self.combine = COMBINE[reduction]
        self.leaders = group.placement.leaders
        width = total.element_size()
        count = len(cuts(total.nbytes))
        count += -count % self.shares()
        self.cuts = cuts(total.nbytes, -(-total.numel() // count) * width)
        self.segments = [slice(cut.start // width, cut.stop // width) for cut in self.cuts]

    def shares(self) -> int:
        """Return of what number there must be a multiple of segments."""
        return 1

    def begin(self) -> None:
        """Let what the other leaders send come."""
        raise NotImplementedError

    def end(self) -> None:
        """Forget the streams."""
        raise NotImplementedError

    async def cross(self, number: int) -> None:
        """Make the leader's segment of `total` whole."""
        raise NotImplementedError

    async def run(self) -> None:
        """Up, across and down, segment after segment."""
        island, leads = self.group.island, self.group.placement.leads
        up: list[asyncio.Future[None]] = []
        down: list[asyncio.Future[None]] = []
        async with asyncio.TaskGroup() as tasks:
            crossing = []
            for number, part in enumerate(self.segments):
                self.partial.append(self.total[part].clone())
                if island is not None:
                    up.append(island.reduce(self.partial[number], 0, self.inside))
                if leads:
                    crossing.append(tasks.create_task(self._finish(number, up)))
                await asyncio.sleep(0)  # the first segments go while the others are copied
            if leads:
                self.begin()  # not earlier: what arrives overwrites `total`
                self.begun.set()
            for number, part in enumerate(self.segments):
                if leads:
                    await crossing[number]
                if island is not None:
                    down.append(island.broadcast(self.total[part].view(torch.uint8), 0))
            await asyncio.gather(*up, *down)
        if leads:
            self.end()

    async def _finish(self, number: int, up: Sequence[asyncio.Future[None]]) -> None:
        """Bring one segment across once this site's sum of it is there."""
        if up:
            await up[number]
        await self.cross(number)
        if self.average:
            self.total[self.segments[number]].div_(len(self.group.addresses))

    async def send(self, to: Sequence[str], tag: int, number: int, segment: torch.Tensor) -> None:
        """Send a segment that nobody changes any more."""
        await send_sums(self.group, to, replace(self.key, tag=tag), number, self.total.nbytes, segment)

    def receive(self, source: int, tag: int, place: torch.Tensor) -> Arrivals:
        """Begin to receive segments of a leader."""
        return receive_sums(self.group, replace(self.key, tag=tag), source, place, self.cuts)

    def done(self, arrivals: Sequence[Arrivals], *sent: tuple[Sequence[str], int]) -> None:
        """Forget streams: those that arrived, and those sent (receivers, tag)."""
        for arrived in arrivals:
            self.group.endpoint.inbox.end(arrived)
        for to, tag in sent:
            self.group.endpoint.outbox.end(to, replace(self.key, tag=tag))


class _Exchange(_AllReduce):
    """Every leader sends its sums to all others."""

    def begin(self) -> None:
        others = [leader for leader in self.leaders if leader != self.group.placement.rank]
        # Of two sites the other's sum lands where the total will be; of more, each in a place of its own.
        self.sums = {leader: self.total if len(others) == 1 else torch.empty_like(self.total) for leader in others}
        self.arrivals = [self.receive(leader, _SUM, place) for leader, place in self.sums.items()]

    async def cross(self, number: int) -> None:
        part, mine = self.segments[number], self.partial[number]
        await self.send(self.group.placement.other_leaders, _SUM, number, mine)
        await self.begun.wait()
        for arrivals in self.arrivals:
            await arrivals.piece(number)
        here = self.group.placement.rank
        *sums, last = (mine if leader == here else self.sums[leader][part] for leader in self.leaders)
        self.combine(reduce(self.combine, sums), last, out=self.total[part])

    def end(self) -> None:
        self.done(self.arrivals, (self.group.placement.other_leaders, _SUM))


class _Round(_AllReduce):
    """Sums go from each leader to the next; the last of a segment sends the total to all others."""

    def shares(self) -> int:
        return len(self.leaders)

    def begin(self) -> None:
        addresses, at = self.group.addresses, self.leaders.index(self.group.placement.local[0])
        self.position = at
        self.following = (addresses[self.leaders[(at + 1) % len(self.leaders)]],)
        self.sums = self.receive(self.leaders[at - 1], _SUM, self.total)
        self.totals = {
            owner: self.receive(leader, _TOTAL, self.total) for owner, leader in enumerate(self.leaders) if owner != at
        }

    async def cross(self, number: int) -> None:
        await self.begun.wait()
        part, owner = self.segments[number], number % len(self.leaders)
        segment = self.partial[number]
        if self.position != (owner + 1) % len(self.leaders):  # the first adds to nothing
            await self.sums.piece(number)
            segment = self.combine(self.total[part], segment)
        if self.position == owner:
            await self.send(self.group.placement.other_leaders, _TOTAL, number, segment)
            self.total[part] = segment
        else:
            await self.send(self.following, _SUM, number, segment)
            await self.totals[owner].piece(number)

    def end(self) -> None:
        self.done(
            [self.sums, *self.totals.values()], (self.following, _SUM), (self.group.placement.other_leaders, _TOTAL)
        )
