"""Groups of samples on their way to the trainer: how many may be under way, and which are too old to train on.

    admit:  start groups while  (max_staleness + served + 1) x batch - (accepted + running) > 0
    batch:  wait for `batch` accepted groups, and for those whose last chance it is: the next version makes them too old
            (what is too old all the same, its oldest token more than max_staleness versions, is dropped)
            of those with equal rewards, up to (max_draws - 1) x batch do not count as accepted while they wait, so that
            others are drawn in their place; they are taken last, in the order of the prompts, or rejected
            a batch may be taken before the version is there that it is trained from
    trained: one more batch is; served: its weights are, too

With max_staleness 0 the groups of an iteration start when its weights are served: synchronous training. Without the
wait the groups with the longest responses would be overtaken and dropped, and the policy would learn from short ones.
Source of the admission: AReaL (arXiv 2505.24298), section 5.1, staleness-aware training; of what is drawn in place of
others: dynamic sampling, DAPO (arXiv 2503.14476, section 3.2), bounded as in verl (`max_num_gen_batches`).

Prompts are numbered in the order in which they are drawn, and each is drawn once: trained on, dropped or rejected.
Without staleness the batches depend on the numbers alone, not on which group came back first.

A feed goes on where another one stopped from the other's `position` after a trained batch: what was under way then, or
waited for a later batch, comes again, before all others and in its order, with the samples that it had. So no prompt is
skipped, and none is trained on twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from hetrl.runtime.rl.sampling import PromptGroup

log = logging.getLogger(__name__)

Draw = Callable[[int], Awaitable[PromptGroup]]


def capacity(max_staleness: int, iterations: int, batch: int, accepted: int, running: int) -> int:
    """Return how many more groups may start; `accepted` counts those that were trained on, too."""
    return (max_staleness + iterations + 1) * batch - (accepted + running)


def oldest_version(group: PromptGroup) -> int:
    """Return the oldest weight version that any token of the group was drawn under."""
    return min(span.version for sample in group.samples for span in sample.versions)


def equal_rewards(group: PromptGroup) -> bool:
    """Return whether no sample of the group is better than another."""
    return len(set(group.rewards)) < 2


@dataclass(frozen=True)
class Position:
    """Where a feed is after `batches` trained batches.

    `following` is the first prompt that nobody asked for; those of `again` come before it, and came to nothing yet.
    """

    batches: int = 0
    following: int = 0
    again: tuple[int, ...] = ()
    dropped: int = 0
    rejected: int = 0


@dataclass
class _Settled:
    """The prompts that one batch took, dropped or rejected."""

    taken: list[int] = field(default_factory=list)
    groups: tuple[PromptGroup, ...] = ()  # that were taken
    dropped: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)

    @property
    def numbers(self) -> list[int]:
        return self.taken + self.dropped + self.rejected


class Feed:
    """Draws groups ahead of the trainer; `draw(number)` samples the group of prompt `number`."""

    def __init__(
        self,
        draw: Draw,
        batch: int,
        max_staleness: int,
        iterations: int,
        version: int,
        max_draws: int = 1,
        start: Position = Position(),
        drawn_under: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Feed batches of `batch` groups, `iterations` in all with those before `start`.

        The first is trained from weight version `version`. At `max_draws` 1 groups with equal rewards are like others.
        Of some prompts samples were begun before `start`: `drawn_under` has the oldest version of each.
        """
        self._draw, self._batch, self._max_staleness = draw, batch, max_staleness
        self._needed = iterations * batch
        self._version, self._served, self._batches = version, start.batches, start.batches
        self._running: dict[int, asyncio.Future[PromptGroup]] = {}
        self._since: dict[int, int] = {}  # the version that served when a running group was admitted, or of its samples
        self._drawn_under = drawn_under
        self._waiting: dict[int, PromptGroup] = {}
        self._changed = asyncio.Event()  # a group is drawn
        self._most_rejected = (max_draws - 1) * batch
        self._taken = start.batches * batch
        self._next, self._again = start.following, deque(start.again)
        self._settling = _Settled()  # by the batch that is to be taken
        self._ahead: deque[_Settled] = deque()  # batches that are taken and not trained yet
        self.dropped, self.rejected = start.dropped, start.rejected

    @property
    def position(self) -> Position:
        """Return where the feed is after the batches that were `trained`."""
        undone = [*self._ahead, self._settling]
        again = {*self._again, *self._running, *self._waiting, *(n for one in undone for n in one.numbers)}
        return Position(
            batches=self._batches,
            following=self._next,
            again=tuple(sorted(again)),
            dropped=self.dropped - sum(len(one.dropped) for one in undone),
            rejected=self.rejected - sum(len(one.rejected) for one in undone),
        )

    @property
    def finished(self) -> dict[int, PromptGroup]:
        """Return the groups that are drawn and not trained yet, by their prompts."""
        ahead = {n: group for one in self._ahead for n, group in zip(one.taken, one.groups, strict=True)}
        done = {n: task for n, task in self._running.items() if task.done() and not task.cancelled()}
        return {**ahead, **self._waiting, **{n: one.result() for n, one in done.items() if one.exception() is None}}

    async def batch(self, version: int) -> tuple[PromptGroup, ...]:
        """Return the batch that is trained from `version`, in the order of the prompts; raises what a draw raised."""
        arrived = [*self._waiting]
        while True:
            self._sweep(arrived, version)
            self._admit()
            if self._accepted() >= self._batch and not self._leaves_behind(version):
                return self._take()
            await self._changed.wait()
            self._changed.clear()
            arrived = self._collect()

    def trained(self) -> None:
        """Note that the oldest batch that was taken is trained: its prompts are done with."""
        self._batches += 1
        if self._ahead:
            self._ahead.popleft()

    def served(self, version: int) -> None:
        """Note that `version`, which another batch gave, is served; more groups may start."""
        self._version, self._served = version, self._served + 1
        self._admit()

    async def close(self) -> None:
        """Give up the groups that are under way."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    def _admit(self) -> None:
        accepted = self._taken + self._accepted()
        allowed = capacity(self._max_staleness, self._served, self._batch, accepted, len(self._running))
        for _ in range(min(allowed, self._needed - accepted - len(self._running))):
            number = self._again.popleft() if self._again else self._next
            self._next = max(self._next, number + 1)
            self._running[number] = group = asyncio.ensure_future(self._draw(number))
            group.add_done_callback(lambda _: self._changed.set())
            self._since[number] = min(self._version, self._drawn_under.get(number, self._version))

    def _collect(self) -> list[int]:
        """Let the groups that are drawn wait; return which."""
        drawn = [number for number, task in self._running.items() if task.done()]
        for number in drawn:
            del self._since[number]
            self._waiting[number] = self._running.pop(number).result()
        return drawn

    def _accepted(self) -> int:
        """Return how many groups wait that none is drawn in place of."""
        return len(self._waiting) - min(self._most_rejected, len(self._equal()))

    def _equal(self) -> list[int]:
        """Return the waiting groups that others may be drawn in place of, in the order of the prompts."""
        if not self._most_rejected:
            return []
        return sorted(number for number, group in self._waiting.items() if equal_rewards(group))

    def _leaves_behind(self, version: int) -> bool:
        """Whether a group is under way that this batch may take and the next one may not."""
        return version - self._max_staleness in self._since.values()

    def _sweep(self, numbers: Sequence[int], version: int) -> None:
        """Drop those of some groups that wait which are too old for a version."""
        stale = [n for n in numbers if version - oldest_version(self._waiting[n]) > self._max_staleness]
        for number in stale:
            del self._waiting[number]
        self._settling.dropped += stale
        self.dropped += len(stale)

    def _take(self) -> tuple[PromptGroup, ...]:
        equal = self._equal()
        numbers = sorted(sorted(self._waiting, key=lambda number: (number in equal, number))[: self._batch])
        self._taken += len(numbers)
        groups = tuple(self._waiting.pop(number) for number in numbers)
        rejected = [number for number in equal if number in self._waiting][: self._most_rejected]
        for number in rejected:
            del self._waiting[number]
        self.rejected += len(rejected)
        self._settling.taken, self._settling.groups, self._settling.rejected = numbers, groups, rejected
        self._ahead.append(self._settling)
        self._settling = _Settled()
        if taken := len([number for number in equal if number in numbers]):
            log.warning(
                "a batch has %d groups of equal rewards, since %d others were rejected already: nothing is learnt from "
                "them; raise algorithm.dynamic_sampling.max_draws, or give prompts of another difficulty",
                *(taken, len(rejected)),
            )
        return groups
