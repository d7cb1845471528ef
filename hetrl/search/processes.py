"""One search in several processes: each with a seed of its own, on a core of its own; the best of all counts.

    every process:  read the problem's numbers, load what is compiled; then search for the same seconds
    the launcher:   add up how far they are; at Ctrl-C tell them to stop, and take what they have

With a bound on evaluations each gets its share, and the same seed gives the same plan. The first process draws as a
search without others does.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event

from hetrl.cost.efficiency import fitted, prefer
from hetrl.errors import HetrlError
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import Best, Limits, Progress, Search
from hetrl.search.space import Space

LOOK_SECONDS = 0.1
SEEDS_APART = 1 << 32  # more than anybody counts seeds up to: no two processes of two searches share one


@dataclass(frozen=True)
class _Shared:
    """What a process has of the launcher: the signal to stop, and where it says how far it is."""

    stop: Event
    told: SimpleQueue[tuple[int, Progress]]


_shared: list[_Shared] = []  # of this process, where it is one of those that search


def search_apart(
    method: Search,
    evaluator: Evaluator,
    limits: Limits,
    seed: int,
    processes: int,
    report: Callable[[Progress], None] | None = None,
) -> tuple[Best, int]:
    """Search as `method` does, in so many processes; return the best candidate of all and how many plans were valued.

    The time up to the deadline begins anew in each process, when it has loaded what it needs. Raises HetrlError where a
    process dies.
    """
    seconds = limits.deadline - time.monotonic()
    share = None if limits.evaluations is None else max(limits.evaluations // processes, 1)
    asked = method, evaluator.space, evaluator.narrow, seconds, share
    context = multiprocessing.get_context("spawn")  # threads of the caller may hold locks that a fork would copy
    shared = _Shared(context.Event(), context.SimpleQueue())
    with ProcessPoolExecutor(processes, context, _begin, (fitted().measured, shared)) as pool:
        with _deaf_to_interrupts():
            running = [pool.submit(_search, number, seed + number * SEEDS_APART, *asked) for number in range(processes)]
        interrupted = _follow(running, shared, report)
        try:
            found = [one.result() for one in running]
        except BrokenProcessPool:
            raise HetrlError(
                f"one of {processes} search processes was killed, for its memory perhaps; take fewer planner.processes"
            ) from None
    best = min((one for one, _ in found), key=lambda one: one.value)
    return replace(best, interrupted=interrupted), sum(compared for _, compared in found)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let processes that start here inherit that Ctrl-C is not for them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _follow(
    running: Sequence[Future[tuple[Best, int]]], shared: _Shared, report: Callable[[Progress], None] | None
) -> bool:
    """Report until all have ended; at an interrupt tell them to stop. Returns whether there was one."""
    latest: dict[int, Progress] = {}
    try:
        while wait(running, LOOK_SECONDS).not_done:
            news = False
            while not shared.told.empty():
                number, latest[number] = shared.told.get()
                news = True
            if report is not None and news:
                report(_together(latest))
    except KeyboardInterrupt:
        shared.stop.set()
        return True
    return False


def _together(latest: Mapping[int, Progress]) -> Progress:
    return Progress(
        min(one.seconds for one in latest.values()),
        sum(one.evaluations for one in latest.values()),
        sum(one.arms for one in latest.values()),
    )


# ---- in each process


def _begin(measured: Mapping[str, Mapping[str, float]], shared: _Shared) -> None:
    prefer(measured)
    _shared[:] = [shared]


def _search(
    number: int, seed: int, method: Search, space: Space, narrow: bool, seconds: float, evaluations: int | None
) -> tuple[Best, int]:
    (shared,) = _shared
    evaluator = Evaluator(space, narrow)
    limits = Limits(time.monotonic() + seconds, evaluations, shared.stop.is_set)

    def report(progress: Progress) -> None:
        with suppress(OSError):  # the launcher was killed
            shared.told.put((number, progress))

    return method(evaluator, limits, seed, report), evaluator.evaluations
