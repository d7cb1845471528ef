"""The process group of torch.distributed for ranks on several sites.

torch.distributed calls the methods of `WanProcessGroup`, whose names and arguments are those of c10d's ProcessGroup;
each starts a coroutine on the endpoint's loop and returns a `WanWork`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from hetrl.errors import UsageError
from hetrl.runtime.wan.all_reduce import all_reduce
from hetrl.runtime.wan.collectives import AS_IT_IS, Way, receive, send, spread
from hetrl.runtime.wan.communicator import Communicator, Operation
from hetrl.runtime.wan.element_types import carried, unsupported
from hetrl.runtime.wan.endpoint import GroupError
from hetrl.runtime.wan.gathered_changes import GatheredChanges
from hetrl.runtime.wan.reduce_scatter import reduce_scatter
from hetrl.runtime.wan.streams import Key
from hetrl.runtime.wan.work import Staged, WanWork

_CLOSE_SECONDS = 5.0

_Coroutine = Callable[[Operation], Awaitable[None]]

# Any: the methods are called with the arguments of one of several overloads each.
_ProcessGroup: Any = dist.ProcessGroup


class WanProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of torch.distributed over a `Communicator`."""

    def __init__(self, group: Communicator, timeout: timedelta, on_shutdown: Callable[[], None]) -> None:
        placement = group.placement
        super().__init__(placement.rank, len(placement.addresses))
        self._group, self._timeout, self._on_shutdown = group, timeout, on_shutdown
        self._changing: MutableMapping[torch.Tensor, Way] = WeakTensorKeyDictionary()  # outputs of `gather_changes`
        self._name = self._description = ""  # torch gives both
        # One count per direction, peer and tag: messages between two ranks are matched in their order.
        self._sent: defaultdict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)
        self._received: defaultdict[tuple[int, int], itertools.count[int]] = defaultdict(itertools.count)

    def getBackendName(self) -> str:  # noqa: N802
        """Return "wan"."""
        return "wan"

    # What torch knows a group by: functional collectives, DeviceMesh and FSDP2 look it up under its name. ProcessGroup
    # keeps both in its backends, of which this group has none.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name under which torch keeps the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name under which torch keeps the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take what the group is for."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return what the group is for."""
        return self._description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound every later operation that does not bring a timeout of its own."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """End the group; what it still does fails."""
        with suppress(GroupError):  # the endpoint is closed already
            self._group.endpoint.call(self._group.close())
        if self._group.island is not None:
            self._group.island.join(_CLOSE_SECONDS)
        self._on_shutdown()

    abort = shutdown

    # ---- point to point

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> WanWork:
        """Send to one rank."""
        operation = self._point_to_point("send to", self._sent, dst, tag)
        staged, to = Staged(_only(tensors)), (self._group.addresses[dst],)
        return self._start(operation, lambda op: send(self._group, op.key, to, staged.host), [], in_turn=False)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> WanWork:
        """Receive from one rank."""
        operation = self._point_to_point("recv from", self._received, src, tag)
        staged = Staged(_only(tensors), fill=False)
        place = staged.host
        return self._start(operation, lambda op: receive(self._group, op.key, src, place), [staged], in_turn=False)

    def _point_to_point(
        self, title: str, counts: defaultdict[tuple[int, int], itertools.count[int]], peer: int, tag: int
    ) -> Operation:
        key = Key(self._group.name, "p2p", next(counts[peer, tag]), tag)
        return Operation(key, self._timeout.total_seconds(), f"{title} {peer} number {key.sequence} (tag {tag})")

    # ---- collectives

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> WanWork:
        """Overwrite the tensor of every rank with the root's."""
        root, staged = opts.rootRank, Staged(_only(tensors), fill=opts.rootRank == self.rank())
        return self._collective("broadcast", opts, lambda op: spread(self._group, op, [(root, staged.host)]), [staged])

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> WanWork:
        """Reduce over all ranks, in place."""
        staged = Staged(_only(tensors))
        return self._collective("all_reduce", opts, self._reduced(staged.host, opts.reduceOp), [staged])

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> WanWork:
        """Reduce several tensors over all ranks, in place."""
        staged = [Staged(tensor) for tensor in tensors]
        parts = [self._reduced(one.host, opts.reduceOp) for one in staged]
        return self._collective("all_reduce", opts, _one_after_the_other(parts), staged)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> WanWork:
        """Reduce over all ranks, into the root's tensor."""
        staged = Staged(_only(tensors))
        total = staged.host.clone()
        reduced = self._reduced(total, opts.reduceOp)

        async def keep_at_root(operation: Operation) -> None:
            await reduced(operation)
            if self.rank() == opts.rootRank:
                staged.host.copy_(total)

        return self._collective("reduce", opts, keep_at_root, [staged])

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> WanWork:
        """Give every rank the tensors of all ranks, which may differ in size."""
        staged = [Staged(one, fill=False) for one in _only(outputs)]
        work = self._gathered([one.host for one in staged], _only(inputs))
        return self._collective("all_gather", opts, work, staged)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> WanWork:
        """Give every rank the tensors of all ranks in one tensor, in rank order."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> WanWork:
        """Do several `all_gather_single`."""
        ways, leads = [self._changing.get(output, AS_IT_IS) for output in outputs], self._group.placement.leads
        staged = [Staged(output, fill=leads and way is not AS_IT_IS) for output, way in zip(outputs, ways, strict=True)]
        parts = [
            self._gathered(self._shares(one.host, tensor.numel(), "all_gather"), tensor, way)
            for one, tensor, way in zip(staged, inputs, ways, strict=True)
        ]
        return self._collective("all_gather", opts, _one_after_the_other(parts), staged)

    def gather_changes(self, output: torch.Tensor) -> None:
        """Let every later `all_gather_single` into this very tensor send what changed since the one before.

        The first sends all values; then a rank keeps a copy of its share in host memory. Nothing else than its owner
        writes a share in between: where something does (weights are loaded), call this again, and the next gather sends
        all. What some rank holds must be what the last gather left, else the next one raises GroupError. Raises
        UsageError for elements that have not 2 or 4 bytes.
        """
        self._changing[output] = GatheredChanges(output)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> WanWork:
        """Reduce the inputs over all ranks; each rank keeps the one of its number."""
        whole = torch.cat([Staged(one).host for one in _only(inputs)])
        return self.reduce_scatter_single_coalesced(outputs, [whole], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> WanWork:
        """Reduce a tensor over all ranks; each rank keeps its share of it, in rank order."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> WanWork:
        """Do several `reduce_scatter_single`."""
        staged = [Staged(output, fill=False) for output in outputs]
        parts = [
            self._scattered(one.host, Staged(tensor).host.clone(), opts.reduceOp)
            for one, tensor in zip(staged, inputs, strict=True)
        ]
        # The inputs are copies, and an output is written in the second half: nobody can tell that two overlap.
        work, halves = _one_after_the_other(parts), len(parts) == 1
        return self._collective("reduce_scatter", opts, work, staged, halves=halves)

    # Names that torch.distributed of other releases calls.
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def barrier(self, opts: Any) -> WanWork:
        """End when every rank is here."""
        token = torch.zeros(1, dtype=torch.uint8)
        return self._collective("barrier", opts, self._reduced(token, dist.ReduceOp.MAX), [])

    # ---- what is not there

    def alltoall(self, *_: Any) -> NoReturn:
        """Raise UsageError."""
        raise unsupported("all_to_all")

    alltoall_base = all_to_all_single = alltoall

    def gather(self, *_: Any) -> NoReturn:
        """Raise UsageError."""
        raise unsupported("gather")

    def scatter(self, *_: Any) -> NoReturn:
        """Raise UsageError."""
        raise unsupported("scatter")

    def recv_anysource(self, *_: Any) -> NoReturn:
        """Raise UsageError."""
        raise unsupported("recv from any source")

    # ---- how an operation starts

    def _reduced(self, tensor: torch.Tensor, reduction: Any) -> _Coroutine:
        """Return the work that reduces a flat tensor in place."""
        kind, carrier = carried(tensor, reduction)

        async def work(operation: Operation) -> None:
            travelling = tensor.to(carrier)
            await all_reduce(self._group, operation, travelling, kind)
            if travelling is not tensor:
                tensor.copy_(travelling)

        return work

    def _gathered(self, places: list[torch.Tensor], tensor: torch.Tensor, way: Way = AS_IT_IS) -> _Coroutine:
        """Return the work that fills one flat place per rank."""
        mine = Staged(tensor).host

        async def work(operation: Operation) -> None:
            places[self.rank()].copy_(mine)
            await spread(self._group, operation, list(enumerate(places)), way)

        return work

    def _scattered(self, place: torch.Tensor, whole: torch.Tensor, reduction: Any) -> _Coroutine:
        """Return the work that reduces a flat tensor, which is used up, and keeps this rank's share."""
        self._shares(whole, place.numel(), "reduce_scatter")
        kind, carrier = carried(whole, reduction)

        async def work(operation: Operation) -> None:
            await reduce_scatter(self._group, operation, whole.to(carrier), place, kind)

        return work

    def _shares(self, whole: torch.Tensor, each: int, name: str) -> list[torch.Tensor]:
        """Cut a flat tensor into one share of `each` elements per rank."""
        if whole.numel() != each * self.size():
            raise UsageError(
                f"wan: {name} of {self.size()} shares of {each} elements needs a tensor of {each * self.size()}, "
                f"not {whole.numel()}"
            )
        return [whole[each * rank : each * (rank + 1)] for rank in range(self.size())]

    def _collective(
        self, name: str, opts: Any, work: _Coroutine, results: list[Staged], *, halves: bool = False
    ) -> WanWork:
        given = opts.timeout.total_seconds()
        operation = self._group.operation(name, given if given > 0 else self._timeout.total_seconds(), halves=halves)
        return self._start(operation, work, results)

    def _start(self, operation: Operation, work: _Coroutine, results: list[Staged], *, in_turn: bool = True) -> WanWork:
        async def run() -> None:
            await self._group.run(operation, work, in_turn=in_turn)
            for staged in results:
                if not staged.on_device:
                    staged.write_back()

        return WanWork(operation.title, self._group.endpoint.submit(run()), results)


def _one_after_the_other(parts: Sequence[_Coroutine]) -> _Coroutine:
    """Return the work of one operation on several tensors."""
    if len(parts) == 1:
        return parts[0]

    async def work(operation: Operation) -> None:
        for number, part in enumerate(parts):
            await part(operation.part(number))

    return work


def _only(tensors: Sequence[Any]) -> Any:
    """Return the one element; c10d's lists are of the devices of a process, which is one."""
    if len(tensors) != 1:
        raise unsupported(f"a list of {len(tensors)} tensors")
    return tensors[0]
