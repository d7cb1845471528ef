"""One rank of the benchmark `across`: joins a world, then takes the optimiser steps that each line on stdin asks for.

Compute is a sleep; what a step sends has the bytes of a smaller model, and goes through the runtime's own groups.

    data        sleep, reduce_scatter of the gradient in bf16, change some parameters, all_gather of them; a bucket is
                reduced once the last backward pass is so far, as megatron does it
    pipeline    1F1B over the stages, an activation forth and a gradient back per micro-batch
    both        the pipeline, and what data does among the replicas of the stage
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetrl.cost.formulas import bucket_count
from hetrl.runtime import wire
from hetrl.runtime.transport.member import Member
from hetrl.runtime.wan import world
from hetrl.runtime.wan.group import WanProcessGroup
from hetrl.runtime.wire.keys import read_keys

TIMEOUT_SECONDS = 300.0
FORWARD = 1 / 3  # of the time of a micro-batch


@dataclass(frozen=True)
class Step:
    """What a rank does in a step: the replicas of its stage, the ranks of the stages of its replica, and how much."""

    replicas: tuple[int, ...]
    stages: tuple[int, ...]
    parameters: int  # of its stage
    activation_bytes: int
    micro_batches: int
    micro_batch_seconds: float  # forward and backward on one stage
    changed: float  # share of the parameters that an update changes


class Rank:
    """The groups and tensors of a rank for one kind of step."""

    def __init__(self, rank: int, step: Step, group: dist.ProcessGroup | None) -> None:
        self.rank, self.step, self.group = rank, step, group
        self.place = step.stages.index(rank)
        self.forth, self.back = (torch.zeros(step.activation_bytes, dtype=torch.uint8) for _ in range(2))
        if group is not None:
            size, number = len(step.replicas), step.replicas.index(rank)
            buckets = round(bucket_count(step.parameters, size))
            each = step.parameters // size // buckets
            normal = torch.randn(buckets, size * each, generator=torch.Generator().manual_seed(self.rank))
            self.gradient = (1e-3 * normal).to(torch.bfloat16)  # it crosses packed: ones would be nothing
            self.share = torch.empty(buckets, each, dtype=torch.bfloat16)
            self.weights = torch.ones(buckets * size * each, dtype=torch.bfloat16)
            self.mine = self.weights.view(size, -1)[number]
            some = torch.rand(len(self.mine), generator=torch.Generator().manual_seed(number)) < step.changed
            self.updated = some.nonzero().flatten()
            if isinstance(group, WanProcessGroup):  # others lie in one site
                group.gather_changes(self.weights)

    def take(self) -> None:
        """Take a step."""
        self.pipeline()
        if self.group is not None:
            self.mine.view(torch.int16)[self.updated] += 1  # to the next value of bf16
            dist.all_gather_single(self.weights, self.mine.clone(), group=self.group)

    def pipeline(self) -> None:
        """Do all micro-batches, 1F1B: a stage runs ahead by as many forwards as there are stages behind it."""
        step, ahead = self.step, min(len(self.step.stages) - 1 - self.place, self.step.micro_batches)
        self._pending: list[dist.Work] = []
        for _ in range(ahead):
            self.forward()
        for number in range(step.micro_batches - ahead):
            self.forward()
            self.backward(last=not ahead and number + 1 == step.micro_batches)
        for number in range(ahead):
            self.backward(last=number + 1 == ahead)
        for work in self._pending:
            work.wait()

    def forward(self) -> None:
        """Do one forward pass of this stage."""
        if self.place > 0:
            dist.recv(self.forth, self.step.stages[self.place - 1])
        time.sleep(FORWARD * self.step.micro_batch_seconds)
        if self.place + 1 < len(self.step.stages):
            self._begin(dist.isend(self.forth, self.step.stages[self.place + 1]))

    def backward(self, last: bool) -> None:
        """Do one backward pass of this stage; the last one reduces bucket after bucket."""
        if self.place + 1 < len(self.step.stages):
            dist.recv(self.back, self.step.stages[self.place + 1])
        for share, bucket in zip(self.share, self.gradient, strict=True) if last and self.group is not None else ():
            time.sleep((1 - FORWARD) * self.step.micro_batch_seconds / len(self.gradient))
            self._begin(dist.reduce_scatter_single(share, bucket, group=self.group, async_op=True))
        if not last or self.group is None:
            time.sleep((1 - FORWARD) * self.step.micro_batch_seconds)
        if self.place > 0:
            self._begin(dist.isend(self.back, self.step.stages[self.place - 1]))

    def _begin(self, work: dist.Work | None) -> None:
        assert work is not None  # this rank is in the group
        self._pending.append(work)


def sent_bytes() -> dict[str, int]:
    """Return what this rank's site has sent to each other one so far."""
    assert world._world is not None
    endpoint = world._world.endpoint
    gateway = wire.gateway_of(wire.site_of(endpoint.address))
    asked = endpoint.member.request(gateway, wire.LinkStats(), timeout_seconds=20, doing="counters")
    stats = endpoint.call(asked).message
    assert isinstance(stats, wire.LinkStatsReply)
    return {site: link.bytes_sent for site, link in stats.links.items()}


def link_gbps(size_bytes: int) -> float:
    """Return, at the first two ranks, what comes from the other one while as much goes there, as an exchange has it."""
    rank = dist.get_rank()
    tensors = [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2)]
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_SECONDS)) for _ in tensors]
    seconds = []
    for _ in range(2):
        dist.barrier()
        began = time.monotonic()
        if rank < 2:
            works = [dist.broadcast(tensors[one], one, groups[one], async_op=True) for one in range(2)]
            works[1 - rank].wait()
            seconds.append(time.monotonic() - began)
            works[rank].wait()
    return size_bytes * 8e-9 / seconds[-1] if seconds else 0.0


def measured(rank: int, steps: int, all_ranks: list[Any]) -> tuple[list[float], dict[str, int]]:
    """Return the seconds of each step of this kind, and the bytes that this site sent in all but the first."""
    asked = [Step(**{**one, "replicas": tuple(one["replicas"]), "stages": tuple(one["stages"])}) for one in all_ranks]
    groups = {}
    for one in asked:  # every rank makes every group, in the same order
        if len(one.replicas) > 1 and one.replicas not in groups:
            groups[one.replicas] = dist.new_group(list(one.replicas), timeout=timedelta(seconds=TIMEOUT_SECONDS))
    here = Rank(rank, asked[rank], groups.get(asked[rank].replicas)) if rank < len(asked) else None
    seconds, before = [], {}
    for number in range(steps):
        dist.barrier()
        if number == 1:
            before = sent_bytes()
        dist.barrier()
        began = time.monotonic()
        if here is not None:
            here.take()
        seconds.append(time.monotonic() - began)
    dist.barrier()
    return seconds, {site: total - before[site] for site, total in sent_bytes().items()}


def main() -> None:
    """Serve until stdin ends."""
    ranks, gateways, rank = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    here = ranks[rank]
    member = Member(here, "run", gateways[wire.site_of(here)], read_keys(Path("keys.json")), Path())
    world.start_wan_world(member, ranks, rank, timeout_seconds=TIMEOUT_SECONDS)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(link_gbps(*arguments) if what == "link" else measured(rank, *arguments)), flush=True)
    world.stop_wan_world()


if __name__ == "__main__":
    main()
