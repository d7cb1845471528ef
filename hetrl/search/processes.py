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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Event

from hetrl.errors import HetrlError
from hetrl.search.evaluate import Evaluator
from hetrl.search.limits import SEEDS_APART, Best, Limits, Progress, Search
from hetrl.search.space import Space

Told = Progress | tuple[Best, int] | Exception  # how far a process is, what it found or why it found nothing


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
    stop, running, ears = context.Event(), [], []
    try:
        for number in range(processes):
            ear, mouth = context.Pipe(duplex=False)
            one = context.Process(target=_search, args=(mouth, stop, seed + number * SEEDS_APART, *asked))
            with _deaf_to_interrupts():
                one.start()
                running.append(one)
            mouth.close()
            ears.append(ear)
        found, interrupted = _followed(ears, stop, report)
    finally:
        for one in running:
            one.kill()  # those that have told what they found have nothing left to do
            one.join()
    best = min((one for one, _ in found), key=lambda one: one.value)
    return replace(best, interrupted=interrupted), sum(compared for _, compared in found)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Let a process that starts here inherit that Ctrl-C is not for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _followed(
    ears: Sequence[Connection], stop: Event, report: Callable[[Progress], None] | None
) -> tuple[list[tuple[Best, int]], bool]:
    """Report until all have told what they found; at an interrupt tell them to stop. Returns whether there was one."""
    latest: dict[int, Progress] = {}
    found: dict[int, tuple[Best, int]] = {}
    interrupted = False
    while len(found) < len(ears):
        try:
            for ear in wait([ear for number, ear in enumerate(ears) if number not in found]):
                assert isinstance(ear, Connection)
                number, told = ears.index(ear), _heard(ear, len(ears))
                if isinstance(told, tuple):
                    found[number] = told
                    continue
                latest[number] = told
                if report is not None and not interrupted:
                    report(_together(latest.values()))
        except KeyboardInterrupt:
            stop.set()
            interrupted = True
    return [found[number] for number in range(len(ears))], interrupted


def _heard(ear: Connection, processes: int) -> Progress | tuple[Best, int]:
    try:
        told: Told = ear.recv()
    except (EOFError, ConnectionResetError):
        raise HetrlError(
            f"one of {processes} search processes was killed, for its memory perhaps; take fewer planner.processes"
        ) from None
    if isinstance(told, Exception):
        raise told
    return told


def _together(latest: Collection[Progress]) -> Progress:
    evaluations = sum(one.evaluations for one in latest)
    return Progress(min(one.seconds for one in latest), evaluations, sum(one.arms for one in latest))


# ---- in each process


def _search(
    mouth: Connection,
    stop: Event,
    seed: int,
    method: Search,
    space: Space,
    narrow: bool,
    seconds: float,
    evaluations: int | None,
) -> None:
    def tell(what: Told) -> None:
        with suppress(OSError):  # the launcher was killed
            mouth.send(what)

    try:
        evaluator = Evaluator(space, narrow)
        limits = Limits(time.monotonic() + seconds, evaluations, stop.is_set)
        tell((method(evaluator, limits, seed, tell), evaluator.evaluations))
    except Exception as error:
        tell(error)
