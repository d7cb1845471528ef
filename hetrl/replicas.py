"""The generation replicas that samples are dispatched to: their places, their measured speeds, what is under way there.

speed   of one sequence where as many run as planned: that of the last stretches, more where more ran beside them; until
        there are any, what is planned beside those measured
part    what is planned for a replica of one batch, and its share of what is planned for those that are not at work:
        no more of a batch run there at once, or a slow replica with many places would begin too many
due     where most of a replica's stretches began with the one that was the last to end whole, at a replica that is no
        faster, they are about to end: responses of one length, and those cut at a limit, come in waves
most    how much a sample may lack that a replica begins, for it to end no later than if it waited for the fastest
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

Key = tuple[int, int]  # of a sample: its prompt, its number there
Begun = tuple[str, Key]  # a replica draws a stretch of a sample

FASTER = 1.2  # a replica counts as faster from here on: measured speeds vary with what is under way
LATE_FACTOR, LATE_SECONDS = 4.0, 30.0  # a stretch is late after so many times what it should take, and so many seconds
SOON = 0.05  # of what a whole stretch takes: stretches that end within it end together
_MEMORY = 1 - 1 / 64  # what a stretch still counts in a replica's speed after the next one


@dataclass(frozen=True)
class Capacity:
    """What the plan says of a replica: how many sequences run at once, and how many samples of a batch are its part."""

    sequences: int
    samples: int

    @property
    def width(self) -> int:
        """Return how many sequences run when all is as planned."""
        return max(1, min(self.sequences, self.samples))

    @property
    def speed(self) -> float:
        """Return the speed of one sequence, in a unit that all replicas of a plan have in common."""
        return max(1, self.samples) / self.width


@dataclass
class Replica:
    """One replica; `under_way` has the samples of which it draws stretches, since when, the oldest first."""

    capacity: Capacity
    speed: float  # of one sequence, where no more run than planned
    tokens: float = 0.0  # of its stretches, and their seconds, older ones counting less
    seconds: float = 0.0
    under_way: dict[Key, float] = field(default_factory=dict)
    crowd: float = 0.0  # sequences under way times seconds, up to the last look, and what it was when each began
    looked: float = 0.0
    crowd_before: dict[Key, float] = field(default_factory=dict)
    hanging: set[Key] = field(default_factory=set)  # of these, those that are late
    doubtful: bool = False  # nothing has come from it since some were: one more may show whether it still hangs
    prompts: set[int] = field(default_factory=set)  # that it has drawn from
    paused: bool = False

    @property
    def measured(self) -> float | None:
        """Return the speed of its stretches; None while it has drawn none."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def rate(self) -> float:
        """Return the speed of as many sequences as planned."""
        return self.speed * self.capacity.width

    @property
    def free(self) -> bool:
        """Return whether one more sequence can run."""
        return self.at_work and len(self.under_way) < (1 if self.doubtful else self.capacity.sequences)

    @property
    def at_work(self) -> bool:
        """Return whether it answers, as far as is known."""
        return not self.hanging and not self.paused

    def load(self, soon: int) -> float:
        """Return how long it has to do with one more sample, once so many stretches have ended."""
        return (len(self.under_way) - soon + 1) / self.rate

    def begin(self, key: Key, now: float) -> None:
        """Let it draw a stretch of a sample."""
        self.look(now)
        self.under_way[key], self.crowd_before[key] = now, self.crowd
        self.prompts.add(key[0])

    def look(self, now: float) -> None:
        """Note how many stretches have been under way since the last look."""
        if now > self.looked:
            self.crowd, self.looked = self.crowd + len(self.under_way) * (now - self.looked), now

    def crowding(self, key: Key, now: float) -> float:
        """Return how many times as many as planned ran beside a stretch that ends, 1 at least."""
        self.look(now)
        beside = (self.crowd - self.crowd_before[key]) / max(now - self.under_way[key], math.ulp(now))
        return max(1.0, beside / self.capacity.width)

    def stop(self, key: Key) -> None:
        """Let it draw a stretch no longer."""
        del self.under_way[key], self.crowd_before[key]
        self.hanging.discard(key)

    def hangs(self, key: Key) -> None:
        """Note that a stretch is late."""
        self.hanging.add(key)
        self.doubtful = True

    def answers(self) -> None:
        """Note that it does not hang."""
        self.hanging.clear()
        self.doubtful = False

    def drawn(self, now: float, stretch: int) -> float:
        """Return how many tokens the stretches under way are expected to have."""
        count, width = len(self.under_way), self.capacity.width
        speed = self.speed * min(1.0, width / max(count, 1))
        return min(speed * max(count * now - sum(self.under_way.values()), 0.0), float(count * stretch))

    def is_late(self, key: Key, now: float, stretch: int) -> bool:
        """Return whether a stretch should have ended long ago."""
        elapsed, late_seconds = now - self.under_way[key], max(LATE_SECONDS, LATE_FACTOR * stretch / self.speed)
        return self.paused or (self.measured is not None and elapsed > late_seconds)


class Replicas(dict[str, Replica]):
    """Those that are not lost, by name; `stretch` are the most tokens that one stretch comes to."""

    def __init__(self, capacities: Mapping[str, Capacity], stretch: int) -> None:
        """Begin with speeds as planned."""
        super().__init__({name: Replica(capacity, capacity.speed) for name, capacity in capacities.items()})
        self._capacities, self._stretch = capacities, stretch
        self._unmeasured = {*capacities}
        self._whole = (0.0, -math.inf, 0.0)  # the last stretch that was whole: planned speed, its begin and its seconds

    def back(self, name: str) -> None:
        """Take a replica back that was given up; it has drawn nothing yet."""
        self[name] = Replica(self._capacities[name], self._capacities[name].speed)
        self._unmeasured.add(name)
        self._set_speeds()

    def drawing(self) -> list[Begun]:
        """Return who draws what."""
        return [(name, key) for name, replica in self.items() for key in replica.under_way]

    def parts(self) -> dict[str, int]:
        """Return how many samples of one batch may run at each replica that is at work."""
        at_work = {name: one.capacity.samples for name, one in self.items() if one.at_work}
        whole, present = sum(one.samples for one in self._capacities.values()), max(1, sum(at_work.values()))
        return {name: max(1, math.ceil(samples * whole / present)) for name, samples in at_work.items()}

    def due(self, now: float) -> Counter[str]:
        """Return how many stretches of each replica are about to end, where most of those not just begun are."""
        speed, began, seconds = self._whole
        margin, found = SOON * seconds, Counter[str]()
        if now > began + seconds + margin:
            return found
        for name, one in self.items():
            if one.at_work and FASTER * one.capacity.speed >= speed:
                since = [*one.under_way.values()]
                count = bisect_right(since, began + margin) - bisect_left(since, began - margin)
                found[name] = count if 2 * count > bisect_left(since, now - margin) else 0
        return found

    def most(self, lacking: float, now: float) -> dict[str, float]:
        """Return how many tokens a sample may lack that each replica begins, where all that are open lack so many."""
        at_work = {name: one for name, one in self.items() if one.at_work}
        fastest, rate = max(one.speed for one in at_work.values()), sum(one.rate for one in at_work.values())
        left = max(lacking - sum(one.drawn(now, self._stretch) for one in self.values()), 0.0) / rate
        longer = {name: 1 / one.speed - FASTER / fastest for name, one in at_work.items()}
        return {name: left / seconds if seconds > 0 else math.inf for name, seconds in longer.items()}

    def measure(self, name: str, key: Key, tokens: int, seconds: float) -> None:
        """Let a stretch count in its replica's speed; speeds that nobody measured stand to the others as planned."""
        replica = self[name]
        began = replica.under_way[key]
        if tokens == self._stretch:
            self._whole = replica.capacity.speed, began, seconds
        counts = tokens * replica.crowding(key, began + seconds)
        replica.tokens, replica.seconds = _MEMORY * replica.tokens + counts, _MEMORY * replica.seconds + seconds
        replica.speed = replica.measured or replica.speed
        if replica.measured:
            self._unmeasured.discard(name)
        if any(other in self for other in self._unmeasured):
            self._set_speeds()

    def _set_speeds(self) -> None:
        measured = {name: one.measured for name, one in self.items()}
        ratios = [speed / self[name].capacity.speed for name, speed in measured.items() if speed is not None]
        unit = sum(ratios) / len(ratios) if ratios else 1.0
        for name, speed in measured.items():
            self[name].speed = speed or self[name].capacity.speed * unit
