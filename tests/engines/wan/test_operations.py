"""Operations over sites and over gloo side by side: one matrix, run by real processes over real gateways."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetrl.runtime.wan.work import Staged, WanWork
from tests.engines.megatron.megatron_worlds import Worlds
from tests.engines.wan.wan_worlds import LAYOUTS, run_sites

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WHOLE = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
_SHAPES = ((), (0,), (1,), (7, 3))
_LARGE = (1_300_001,)  # several pieces, the last one odd
_REDUCTIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")


def _filled(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that sums and products are exact in every type."""
    values = (torch.arange(torch.Size(shape).numel()) + rank) % 3
    return values.reshape(shape).to(dtype)


def _expected(size: int, shape: tuple[int, ...], dtype: torch.dtype, reduction: str, share: int = 0) -> torch.Tensor:
    """Reduce what each rank fills in; of a share, each begins so many numbers later."""
    each = torch.stack([_filled(rank + share, shape, dtype) for rank in range(size)])
    wide = each.to(torch.float64 if dtype.is_floating_point else torch.int64)
    match reduction:
        case "SUM":
            return wide.sum(0).to(dtype)
        case "AVG":
            return (wide.sum(0).to(dtype).double() / size).to(dtype)
        case "MIN":
            return wide.amin(0).to(dtype)
        case "MAX":
            return wide.amax(0).to(dtype)
    return wide.prod(0).to(dtype)


def _matrix(rank: int, size: int) -> list[str]:
    """Return what went wrong."""
    wrong = []
    for dtype in (*_FLOATS, *_WHOLE):
        for shape in (*_SHAPES, *([_LARGE] if dtype in (torch.float32, torch.bfloat16) else [])):
            for reduction in _REDUCTIONS if dtype.is_floating_point and len(shape) != 1 else ("SUM", "MAX"):
                tensor = _filled(rank, shape, dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, reduction))
                if not torch.equal(tensor, _expected(size, shape, dtype, reduction)):
                    wrong.append(f"all_reduce {reduction} {dtype} {shape}")
            for root in (0, size - 1):
                tensor = _filled(rank, shape, dtype)
                dist.broadcast(tensor, root)
                if not torch.equal(tensor, _filled(root, shape, dtype)):
                    wrong.append(f"broadcast {dtype} {shape} from {root}")
            everyone = [_filled(other, shape, dtype) for other in range(size)]
            gathered = [torch.empty_like(tensor) for tensor in everyone]
            dist.all_gather(gathered, everyone[rank])
            if not all(map(torch.equal, gathered, everyone)):
                wrong.append(f"all_gather {dtype} {shape}")
    return wrong


@pytest.mark.parametrize(("layout", "backend"), [("2x2", "gloo"), ("2x2", "wan"), ("2+1+1", "wan"), ("2x1", "wan")])
def test_every_operation_of_every_type_and_shape(worlds: Worlds, layout: str, backend: str) -> None:
    assert run_sites(worlds, layout, backend, _matrix) == [[]] * len(LAYOUTS[layout])


def _scatters(rank: int, size: int) -> list[str]:
    """Return what went wrong."""
    wrong = []
    for dtype in (*_FLOATS, torch.int16, *_WHOLE):
        for shape in (*_SHAPES[1:], *([_LARGE] if dtype in (torch.float32, torch.bfloat16) else [])):
            for reduction in _REDUCTIONS if dtype.is_floating_point else _REDUCTIONS[:1] + _REDUCTIONS[2:]:
                whole = torch.stack([_filled(rank + share, shape, dtype) for share in range(size)])
                before, share = whole.clone(), torch.empty(shape, dtype=dtype)
                dist.reduce_scatter_single(share, whole, getattr(dist.ReduceOp, reduction))
                if not torch.equal(share, _expected(size, shape, dtype, reduction, rank)):
                    wrong.append(f"{reduction} {dtype} {shape}")
                if not torch.equal(whole, before):
                    wrong.append(f"{reduction} {dtype} {shape} changes what it is given")
    return wrong


@pytest.mark.parametrize("layout", ["2x2", "2+1+1", "2x1"])
def test_reduce_scatter_of_every_type_and_shape(worlds: Worlds, layout: str) -> None:
    assert run_sites(worlds, layout, "wan", _scatters) == [[]] * len(LAYOUTS[layout])


def _large_scatter(rank: int, size: int) -> int:
    whole = torch.ones(6_000_000)
    dist.reduce_scatter_single(torch.empty(len(whole) // size), whole)
    return whole.nbytes


def _scatters_at_once(rank: int, size: int) -> list[str]:
    """Many handles, sums of one tensor and of several, between operations of other kinds."""
    wrong, shares, works = [], [], []
    for turn in range(12):
        whole = torch.arange(size * 300_000, dtype=torch.float32) % 1000 + turn + rank
        shares.append(torch.empty(300_000))
        works.append(dist.reduce_scatter_single(shares[-1], whole, async_op=True))
        whole.fill_(-1.0)  # it was read at the call
        if turn % 4 == 1:
            works.append(dist.all_reduce(torch.ones(100_000), async_op=True))
        if turn % 4 == 2:
            works.append(dist.broadcast(torch.ones(100_000), turn % size, async_op=True))
    for work in reversed(works):
        work.wait(timedelta(seconds=60))
    for turn, share in enumerate(shares):
        values = (torch.arange(300_000, dtype=torch.float32) + rank * 300_000) % 1000
        if not torch.equal(share, size * (values + turn) + sum(range(size))):
            wrong.append(f"reduce_scatter {turn}")
    return wrong


@pytest.mark.parametrize("layout", ["2x2", "2+1+1", "3x1"])
def test_reduce_scatters_that_overlap(worlds: Worlds, layout: str) -> None:
    assert run_sites(worlds, layout, "wan", _scatters_at_once) == [[]] * len(LAYOUTS[layout])


@pytest.mark.parametrize(("layout", "of_a_site"), [("2x2", 0.5), ("3x1", 1 / 3), ("2+1+1", 0.25)])
def test_reduce_scatter_sends_a_site_the_shares_of_its_ranks(worlds: Worlds, layout: str, of_a_site: float) -> None:
    crossed: dict[str, int] = {}
    size_bytes = run_sites(worlds, layout, "wan", _large_scatter, crossed)[0]
    to_the_last = [sent for link, sent in crossed.items() if link.endswith(max(link.split("-")[1] for link in crossed))]
    assert all(of_a_site <= sent / size_bytes < of_a_site + 0.01 for sent in to_the_last)
    assert len(to_the_last) == len({rank.split("/")[0] for rank in LAYOUTS[layout]}) - 1


def _other_calls(rank: int, size: int) -> list[str]:
    """The rest of the interface: strides, one tensor out, objects, point to point, handles, groups at once."""
    wrong = []

    def check(what: str, good: bool) -> None:
        if not good:
            wrong.append(what)

    strided = _filled(rank, (40, 30), torch.float32).t()
    dist.all_reduce(strided)
    check("strided all_reduce", torch.equal(strided, _expected(size, (40, 30), torch.float32, "SUM").t()))
    strided = _filled(rank, (40, 30), torch.float32).t()
    dist.broadcast(strided, 0)
    check("strided broadcast", torch.equal(strided, _filled(0, (40, 30), torch.float32).t()))
    whole = torch.empty(size * 5)
    dist.all_gather_single(whole, torch.full((5,), float(rank)))
    check("all_gather_single", torch.equal(whole, torch.arange(float(size)).repeat_interleave(5)))
    share = torch.empty(4)
    dist.reduce_scatter_single(share, torch.arange(4.0 * size) * (rank + 1))
    check(
        "reduce_scatter_single", torch.equal(share, torch.arange(4.0 * size).view(size, 4)[rank] * sum(range(size + 1)))
    )
    reduced = torch.full((3,), float(rank))
    dist.reduce(reduced, size - 1)
    check("reduce", rank != size - 1 or reduced[0].item() == sum(range(size)))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    check("all_gather_object", [each["rank"] for each in objects] == list(range(size)))
    return wrong + _point_to_point(rank, size) + _at_once(rank, size)


def _point_to_point(rank: int, size: int) -> list[str]:
    after, before = (rank + 1) % size, (rank - 1) % size
    tensors = [torch.full((3_000_000,), 10.0 * before), torch.zeros(2), torch.zeros(2), torch.zeros(3_000_000)]
    batch = [
        dist.P2POp(dist.isend, torch.full((3_000_000,), float(rank)), after),
        dist.P2POp(dist.irecv, tensors[3], before),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    # By tag, and in order within a tag.
    sent = [dist.isend(torch.full((2,), value), after, tag=tag) for value, tag in ((1.0, 5), (2.0, 7), (3.0, 5))]
    order = [torch.zeros(2) for _ in range(3)]
    for place, tag in zip(order, (7, 5, 5), strict=True):
        dist.recv(place, before, tag=tag)
    for work in sent:
        work.wait()
    good = tensors[3].eq(before).all().item() and [place[0].item() for place in order] == [2.0, 1.0, 3.0]
    return [] if good else ["point to point"]


def _at_once(rank: int, size: int) -> list[str]:
    """Many handles in several groups, waited for in another order than started."""
    wrong = []
    groups = [dist.new_group(list(range(size)), timeout=timedelta(seconds=60)) for _ in range(2)]
    pairs = [dist.new_group([first, first + 1], timeout=timedelta(seconds=60)) for first in range(size - 1)]
    tensors, works = [], []
    for turn in range(6):
        for number, group in enumerate(groups):
            tensors.append(torch.full((200_000,), float(turn * 10 + number + rank)))
            works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
    for first, pair in enumerate(pairs):
        if rank in (first, first + 1):
            tensor = torch.full((5,), float(rank))
            dist.all_reduce(tensor, group=pair)
            if tensor[0].item() != 2 * first + 1:
                wrong.append(f"pair {first}")
    for number in reversed(range(len(works))):
        works[number].wait(timedelta(seconds=60))
        turn, group = divmod(number, 2)
        if tensors[number][0].item() != size * (turn * 10 + group) + sum(range(size)):
            wrong.append(f"all_reduce {turn} of group {group}")
        if not works[number].is_completed():
            wrong.append("a work that ended says it did not")
    dist.barrier()
    return wrong


@pytest.mark.parametrize(("layout", "backend"), [("2x2", "gloo"), ("2x2", "wan"), ("2+1+1", "wan")])
def test_handles_groups_and_point_to_point(worlds: Worlds, layout: str, backend: str) -> None:
    assert run_sites(worlds, layout, backend, _other_calls) == [[]] * len(LAYOUTS[layout])


def test_what_torch_negates_or_conjugates_when_it_is_read_crosses_as_it_reads() -> None:
    for tensor in (torch.tensor([1.0 + 2.0j]).conj(), torch.tensor([1.0 + 2.0j]).conj().imag):
        staged = Staged(tensor)
        assert torch.equal(staged.host, tensor.resolve_conj().resolve_neg())
        staged.host.fill_(3.0)
        staged.write_back()
        assert torch.equal(tensor, torch.full_like(tensor, 3.0))


def test_a_future_ends_once_the_device_holds_the_result() -> None:
    column = torch.zeros(2, 2)[:, 0]  # its elements are copied, as those of a tensor on a GPU are
    staged, ended = Staged(column), Future[None]()
    staged.on_device = True
    found = WanWork("all_reduce 0", ended, [staged]).get_future().then(lambda future: future.value()[0].tolist())
    staged.host.fill_(3.0)
    ended.set_result(None)
    assert found.wait() == [3.0, 3.0]
