"""The all_reduce of a group on several sites: up inside each site, across, down inside each site.

up        gloo sums each segment onto the leader of its site
across    two sites, or a small tensor: every leader sends its sum to the others, each adds all in site order
          more sites: segment i goes from every leader to that of site i mod s, which adds all in site order and sends
          the total to the others; either way of each link carries 2/s of the tensor, in two trips: a reduce-scatter and
          an all-gather, each one exchange of all with all (Thakur, Rabenseifner and Gropp, Optimization of Collective
          Communication Operations in MPICH, Int. J. High Perform. Comput. Appl. 19, 2005)
down      the leader passes each segment of the total on

The three overlap: while one segment crosses, the next is summed and the one before is passed on. Every element is
summed in an order that depends on the group and the size only, and once, so that all ranks hold the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from hetrl.runtime.wan.coded import receive_sums, send_sums
from hetrl.runtime.wan.communicator import Communicator, Operation
from hetrl.runtime.wan.streams import Arrivals, cuts

# Up to here one trip of n bytes over each link beats the two trips of n / s: they are even at s / (s - 2) times what a
# link holds on its way, 1.5 MB of three sites at 100 Mbps and 40 ms.
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
    kind = _Exchange if sites == 2 or total.nbytes <= SMALL_BYTES else _Shares
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
        self.others = [leader for leader in self.leaders if leader != group.placement.rank]
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

    def add(self, number: int, sums: Mapping[int, torch.Tensor], out: torch.Tensor) -> None:
        """Put the total of a segment into `out`: what the leaders of all sites have of it, in the order of these."""
        here, part = self.group.placement.rank, self.segments[number]
        *first, last = (self.partial[number] if one == here else sums[one][part] for one in self.leaders)
        self.combine(reduce(self.combine, first), last, out=out)

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
        # Of two sites the other's sum lands where the total will be; of more, each in a place of its own.
        if len(self.others) == 1:
            self.sums = {self.others[0]: self.total}
        else:
            self.sums = {leader: torch.empty_like(self.total) for leader in self.others}
        self.arrivals = [self.receive(leader, _SUM, place) for leader, place in self.sums.items()]

    async def cross(self, number: int) -> None:
        part, mine = self.segments[number], self.partial[number]
        await self.send(self.group.placement.other_leaders, _SUM, number, mine)
        await self.begun.wait()
        for arrivals in self.arrivals:
            await arrivals.piece(number)
        self.add(number, self.sums, self.total[part])

    def end(self) -> None:
        self.done(self.arrivals, (self.group.placement.other_leaders, _SUM))


class _Shares(_AllReduce):
    """Every leader gets the sums of the segments that it owns, and sends their totals to all others."""

    def shares(self) -> int:
        return len(self.leaders)

    def begin(self) -> None:
        self.sums = {leader: torch.empty_like(self.total) for leader in self.others}  # used where it owns segments
        self.arrivals = [self.receive(leader, _SUM, place) for leader, place in self.sums.items()]
        self.totals = {leader: self.receive(leader, _TOTAL, self.total) for leader in self.others}

    async def cross(self, number: int) -> None:
        owner, mine = self.leaders[number % len(self.leaders)], self.partial[number]
        if owner != self.group.placement.rank:
            await self.send((self.group.addresses[owner],), _SUM, number, mine)
            await self.begun.wait()
            await self.totals[owner].piece(number)
            return
        await self.begun.wait()
        for arrivals in self.arrivals:
            await arrivals.piece(number)
        self.add(number, self.sums, mine)
        await self.send(self.group.placement.other_leaders, _TOTAL, number, mine)
        self.total[self.segments[number]] = mine

    def end(self) -> None:
        others = self.group.placement.other_leaders
        self.done([*self.arrivals, *self.totals.values()], (others, _SUM), (others, _TOTAL))
