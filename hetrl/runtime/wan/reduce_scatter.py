"""The reduce_scatter of a group on several sites: over each link go the shares of the ranks at its end, and no others.

up        gloo sums the shares of every site's ranks onto the leader of this site
across    the leader sends each other leader the sums of that site's shares, and adds what comes, in site order
down      the leader passes the totals of its own site's shares on

With as many ranks at each of s sites, (s - 1) / s of the tensor go out of each: half of what an all_reduce takes.
Segments overlap as in `hetrl.runtime.wan.all_reduce`, and the order of every sum depends on the group only, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from hetrl.runtime.wan.all_reduce import COMBINE
from hetrl.runtime.wan.coded import receive_sums, send_sums
from hetrl.runtime.wan.communicator import Communicator, Operation
from hetrl.runtime.wan.streams import Arrivals, cuts


async def reduce_scatter(
    group: Communicator, operation: Operation, whole: torch.Tensor, place: torch.Tensor, reduction: Any
) -> None:
    """Reduce a flat tensor, which is used up, over all ranks; `place` gets this rank's share, the shares in rank order.

    `reduction` is one of `REDUCTIONS`.
    """
    if whole.numel():
        await _ReduceScatter(group, operation, whole, reduction).run(place)


def _of_site(whole: torch.Tensor, ranks: Sequence[int], each: int) -> torch.Tensor:
    """Return the shares of some ranks one after the other: a view where they lie so."""
    if ranks[-1] - ranks[0] + 1 == len(ranks):
        return whole[each * ranks[0] : each * (ranks[-1] + 1)]
    return torch.cat([whole[each * rank : each * (rank + 1)] for rank in ranks])


class _ReduceScatter:
    """`parts` are the shares of each site's ranks, at this site's own in the end the totals.

    Up and across are its first half: the sums of the next tensor cross behind those of this one.
    """

    def __init__(self, group: Communicator, operation: Operation, whole: torch.Tensor, reduction: Any) -> None:
        self.group, self.key, self.placement = group, operation.key, group.placement
        self.second_half = operation.second_half
        sites = [*self.placement.sites.values()]
        self.here = sites.index(self.placement.local)
        self.each = whole.numel() // len(group.addresses)
        self.parts = [_of_site(whole, ranks, self.each) for ranks in sites]
        self.others = [site for site in range(len(sites)) if site != self.here]
        self.average = reduction == dist.ReduceOp.AVG
        self.inside = dist.ReduceOp.SUM if self.average else reduction  # what gloo does
        self.combine = COMBINE[reduction]

    def segments(self, site: int) -> list[torch.Tensor]:
        """Return the pieces of a site's part; all ranks cut alike."""
        part = self.parts[site]
        width = part.element_size()
        return [part[cut.start // width : cut.stop // width] for cut in cuts(part.nbytes)]

    async def run(self, place: torch.Tensor) -> None:
        """Up, across and down; `place` gets this rank's share."""
        arrivals = self.begin() if self.placement.leads else {}
        async with asyncio.TaskGroup() as tasks:
            for site in self.others:
                summed = await self.up(site)
                if self.placement.leads:
                    tasks.create_task(self.send(site, summed))
            summed, down = await self.up(self.here), []
            await self.second_half()
            for number, segment in enumerate(self.segments(self.here)):
                await summed[number]  # gloo is done with the memory that the total goes to
                if self.placement.leads:
                    await self.add(number, segment, arrivals)
                if self.group.island is not None:
                    down.append(self.group.island.broadcast(segment.view(torch.uint8), 0))
            await asyncio.gather(*down)
        for arrived in arrivals.values():
            self.group.endpoint.inbox.end(arrived[0])
        mine = self.placement.local.index(self.placement.rank)
        place.copy_(self.parts[self.here][self.each * mine : self.each * (mine + 1)])

    def begin(self) -> dict[int, tuple[Arrivals, torch.Tensor]]:
        """Let the sums of the other sites come, each into a place of its own."""
        found, part = {}, self.parts[self.here]
        for site in self.others:
            sums, key = torch.empty_like(part), replace(self.key, tag=site)
            source = self.placement.leaders[site]
            found[site] = receive_sums(self.group, key, source, sums, cuts(part.nbytes)), sums
        return found

    async def up(self, site: int) -> list[asyncio.Future[None]]:
        """Begin to sum a site's part onto the leader here, segment after segment."""
        island, futures = self.group.island, []
        for segment in self.segments(site):
            if island is not None:
                futures.append(island.reduce(segment, 0, self.inside))
            else:
                futures.append(asyncio.get_running_loop().create_future())
                futures[-1].set_result(None)
            await asyncio.sleep(0)  # the first segments go while the others are begun
        return futures

    async def send(self, site: int, summed: Sequence[asyncio.Future[None]]) -> None:
        """Send a site its part as it is summed; nobody changes it any more."""
        part, key = self.parts[site], replace(self.key, tag=self.here)
        to = (self.group.addresses[self.placement.leaders[site]],)
        for number, segment in enumerate(self.segments(site)):
            await summed[number]
            await send_sums(self.group, to, key, number, part.nbytes, segment)
        self.group.endpoint.outbox.end(to, key)

    async def add(self, number: int, segment: torch.Tensor, arrivals: dict[int, tuple[Arrivals, torch.Tensor]]) -> None:
        """Make a segment of this site's part the total."""
        first = segment.storage_offset() - self.parts[self.here].storage_offset()
        theirs = {}
        for site, (arrived, sums) in arrivals.items():
            await arrived.piece(number)
            theirs[site] = sums[first : first + segment.numel()]
        *first_sites, last = (segment if site == self.here else theirs[site] for site in range(len(self.parts)))
        self.combine(reduce(self.combine, first_sites), last, out=segment)
        if self.average:
            segment.div_(len(self.group.addresses))
