"""What the hardware of one machine does at best: matrix products, copies, all-reduces between two ranks."""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from hetrl.describe.measured import Measurement, Question
from hetrl.errors import HetrlError
from hetrl.runtime.instruments.timing import Repetitions
from hetrl.runtime.wan.torch_world import start_world, stop_world

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MATMUL_SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
ALL_REDUCE_BYTES = {"cpu": (2**10, 2**14, 2**18, 2**22, 2**24), "cuda": (2**12, 2**16, 2**20, 2**24, 2**28)}
RANKS = 2
_MEETING_SECONDS = 60.0


def matmuls(device: torch.device, how: Repetitions) -> Iterator[Measurement]:
    """Yield square products of growing size in bf16 and fp32: 2 n^3 FLOPs each."""
    for dtype, kind in DTYPES.items():
        for size in MATMUL_SIZES[device.type]:
            left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
            result = torch.empty_like(left)
            seconds = how.times(partial(torch.mm, left, right, out=result), device)
            yield Measurement("matmul", {"size": size, "dtype": dtype}, "flops", 2.0 * size**3, how.warm_up, seconds)


def copies(device: torch.device, how: Repetitions) -> Iterator[Measurement]:
    """Yield copies inside the memory (read and written bytes count), and on CUDA to and from pinned host memory."""
    size = COPY_BYTES[device.type]  # ones: pages of zeros may all be one page of the kernel's
    here, there = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    pairs = {"inside": (there, here, 2.0)}
    if device.type == "cuda":
        host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        pairs |= {"host to device": (here, host, 1.0), "device to host": (host, here, 1.0)}
    for direction, (target, source, factor) in pairs.items():
        seconds = how.times(partial(target.copy_, source, non_blocking=True), device)
        question: Question = {"direction": direction, "bytes": size}
        yield Measurement("copy", question, "bytes", factor * size, how.warm_up, seconds)


def all_reduces(device: torch.device, how: Repetitions) -> Iterator[Measurement]:
    """Yield all-reduces between two ranks: gloo, or NCCL between two GPUs.

    Raises HetrlError where there is only one GPU, or where the ranks do not answer.
    """
    if device.type == "cuda" and torch.cuda.device_count() < RANKS:
        raise HetrlError("this machine shows one GPU; an all-reduce needs two")
    sizes = ALL_REDUCE_BYTES[device.type]
    context = get_context("spawn")
    answers: Any = context.Queue()
    with ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "store"  # no port that others could reach
        arguments = (device.type, store, sizes, how, answers)
        ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
            stack.callback(rank.join)
            stack.callback(rank.kill)
        # One sample may begin just before the deadline of its size; a meeting and as much again are room enough.
        patience = 2 * _MEETING_SECONDS + 2 * len(sizes) * how.seconds
        try:
            answer = answers.get(timeout=patience)
        except queue.Empty:
            raise HetrlError(f"the two ranks did not answer in {patience:g} s") from None
        if isinstance(answer, str):
            raise HetrlError(answer)
        for rank in ranks:
            rank.join(_MEETING_SECONDS)
    backend = "nccl" if device.type == "cuda" else "gloo"
    for size, seconds in zip(sizes, answer, strict=True):
        question: Question = {"backend": backend, "ranks": RANKS, "bytes": size}
        yield Measurement("all-reduce", question, "bytes", float(size), how.warm_up, seconds)


def _rank(rank: int, kind: str, store: Path, sizes: tuple[int, ...], how: Repetitions, answers: Any) -> None:
    """Reduce tensors of each size; rank 0 answers with the seconds of the samples, any rank with its error."""
    torch.set_num_threads(1)
    device = torch.device("cpu" if kind == "cpu" else f"cuda:{rank}")
    try:
        start_world(rank, RANKS, FileStore(str(store), RANKS), _MEETING_SECONDS, str(device))
        found = [_reduce_seconds(size, device, how) for size in sizes]
        if rank == 0:
            answers.put(found)
    except Exception as error:
        answers.put(f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0])
    finally:
        stop_world()


def _reduce_seconds(size: int, device: torch.device, how: Repetitions) -> tuple[float, ...]:
    """Return the wall-clock seconds of each all-reduce; both ranks take the same number, so it is fixed beforehand."""
    tensor = torch.zeros(size // 4, device=device)

    def reduce() -> float:
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    dist.barrier()
    first = torch.tensor([max(reduce() for _ in range(how.warm_up + 1))], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    count = max(1, min(how.count, int(how.seconds / float(first))))
    return tuple(reduce() for _ in range(count))
