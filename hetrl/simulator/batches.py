"""A batch of samples on its way through the tasks of a plan: what its groups have done of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetrl.simulator.events import Signal, Turn
from hetrl.workload import ACTOR_GENERATION, INFERENCES


@dataclass(frozen=True)
class Batch:
    """The lengths of a batch's responses, and the turns of the groups.

    Groups have done the tasks of the batch before (`after`), of this one (`left`), and its inferences (`inferred`);
    they have so many tasks to do (`open`), of them `inferences`. The batch is `scored` by the actor's trainer, and
    `ready`: what trainings need is there.
    """

    number: int
    lengths: Sequence[int]
    after: Mapping[Turn, Signal]
    left: Mapping[Turn, Signal]
    inferred: Mapping[Turn, Signal]
    open: Counter[Turn]
    inferences: Counter[Turn]
    scored: Signal = field(default_factory=Signal)
    ready: Signal = field(default_factory=Signal)

    def leave(self, name: str, turn: Turn) -> None:
        """Note that a task has left its group's devices."""
        self.open[turn] -= 1
        self.inferences[turn] -= name in INFERENCES
        if not self.inferences[turn]:
            self.inferred[turn].fire()
        if not self.open[turn]:
            self.left[turn].fire()


def batch_of(number: int, lengths: Sequence[int], after: Mapping[Turn, Signal], turns: Mapping[str, Turn]) -> Batch:
    """Return a batch of which nothing is done; `turns` has that of each task, generation's too."""
    tasks = Counter(turn for name, turn in turns.items() if name != ACTOR_GENERATION)
    inferences = Counter(turn for name, turn in turns.items() if name in INFERENCES)
    left, inferred = ({turn: Signal() for turn in tasks} for _ in range(2))
    for turn in tasks.keys() - inferences.keys():
        inferred[turn].fire()
    return Batch(number, lengths, after, left, inferred, tasks, inferences)
