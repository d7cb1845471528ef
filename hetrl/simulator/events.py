"""The clock of a simulation: processes that wait for seconds to pass or for something to happen.

    a process is a generator; it yields a number of seconds, or a `Signal` that it waits for (`yield from`: several)
    run: take the earliest entry of the queue, set `now` to its time, call it; until the queue is empty

Entries of one time are taken in the order in which they were made, so that a simulation repeats exactly. Nothing here
reads a real clock. Source: process interaction as in SimPy (documentation, "SimPy in 10 minutes").
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator


class Signal:
    """Something that happens once."""

    __slots__ = ("_waiting", "done")

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.done = False
        self._waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Let it happen: everybody who waits goes on, in the order in which they came."""
        if not self.done:
            self.done = True
            for resume in self._waiting:
                resume()
            self._waiting.clear()

    def then(self, resume: Callable[[], None]) -> None:
        """Call `resume` when it happens, at once if it has."""
        if self.done:
            resume()
        else:
            self._waiting.append(resume)


Process = Generator["float | Signal", None, None]


class Clock:
    """Simulated seconds and what is to happen at them."""

    def __init__(self) -> None:
        """Start at 0 s."""
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something so many seconds from now."""
        self._entries += 1
        heapq.heappush(self._queue, (self.now + seconds, self._entries, call))

    def start(self, process: Process) -> Signal:
        """Run a process up to its first wait; the signal fires when it ends."""
        ended = Signal()

        def step() -> None:
            for wanted in process:
                if isinstance(wanted, Signal):
                    if wanted.done:
                        continue
                    wanted.then(step)
                else:
                    self.after(wanted, step)
                return
            ended.fire()

        step()
        return ended

    def run(self, until: Signal) -> None:
        """Let time pass until the signal fires; RuntimeError where nothing is left that could fire it."""
        while not until.done:
            if not self._queue:
                raise RuntimeError(f"the simulation stands still at {self.now:.6g} s: every process waits")
            self.now, _, call = heapq.heappop(self._queue)
            call()


class Turn:
    """The devices of a group: one task at a time, first come first served; `later` lets everybody else go first."""

    def __init__(self) -> None:
        """Nobody has it."""
        self.wanted = Signal()  # somebody else waits for the turn
        self._taken = False
        self._waiting: deque[Signal] = deque()
        self._later: deque[Signal] = deque()

    def take(self, later: bool = False) -> Signal:
        """Return the signal that fires when the turn is the caller's."""
        mine = Signal()
        (self._later if later else self._waiting).append(mine)
        self._pass_on()
        if self._waiting:
            self.wanted.fire()
        return mine

    def give(self) -> None:
        """End the turn; the next one's begins."""
        self._taken = False
        self._pass_on()

    def _pass_on(self) -> None:
        queue = self._waiting or self._later
        if self._taken or not queue:
            return
        self._taken = True
        following = queue.popleft()
        self.wanted = Signal()
        if self._waiting:
            self.wanted.fire()
        following.fire()
