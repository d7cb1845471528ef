"""The evaluator: vectors drawn, repaired, valued and made plans, for one problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetrl.plan.plan import Plan
from hetrl.search.assemble import Made, plan_of
from hetrl.search.core import functions as core
from hetrl.search.core.encoding import Vector, bounds as encoding_bounds, size_of
from hetrl.search.core.records import Packed, Words1
from hetrl.search.core.tables import make_tables
from hetrl.search.core.workspace import INFEASIBLE, VALUED, Bench, Parts, Population, seeded
from hetrl.search.decode import decode
from hetrl.search.space import Space

FIRST_REMEMBERED, MOST_REMEMBERED = 1 << 20, 1 << 24  # slots of 8 bytes: 8 MiB for most searches, at most 128 MiB


class Evaluator:
    """Values vectors of one problem."""

    def __init__(self, space: Space, narrow: bool = False) -> None:
        """Read the problem's numbers from the cost model; `narrow`: for vectors of the integer program's plan space."""
        self.space, self.narrow = space, narrow
        self.tables, self.rows = make_tables(space, narrow)
        self.bench = Bench(self.tables)
        self.size = size_of(self.tables)
        self.evaluations = 0  # distinct complete plans that were valued
        self._seen = np.zeros(FIRST_REMEMBERED, np.uint64)
        self._met = 0

    def random(self, seed: int, group: Sequence[int] | None = None) -> Vector:
        """Return a random legal vector, of a given grouping (the group of each task) or of a random one."""
        x = np.zeros(self.size, np.int32)
        tasks = self.tables.tasks
        x[:tasks] = np.random.default_rng(abs(seed)).integers(0, tasks, tasks) if group is None else group
        core.repair(x, self.bench.pointers[0])  # numbers the groups: draw takes them as they are
        core.draw(x, seeded(seed), self.bench.pointers[0])
        return x

    def evolve(
        self,
        population: Packed[Population],
        children: int,
        state: Words1,
        regroup: float = 0.0,
        temperature: float = 0.0,
    ) -> None:
        """Value so many children of a population, and let the better ones in; see `hetrl.search.core.functions.evolve`.

        `regroup` is the share of them whose grouping changes; with a temperature the population is annealed.
        """
        self._make_room(children)
        asked = (population, children, regroup, temperature, state, *self.bench.pointers, self._seen)
        while (row := core.evolve(*asked)) != VALUED:
            self.rows.fill(self.tables.serving, row)
        self.evaluations += int(population.values.counters[1])
        population.values.counters[1] = 0

    def exchange(self, population: Packed[Population], temperature: float, state: Words1) -> None:
        """Let annealed candidates of neighbouring temperatures change places; see `core.functions.exchange`."""
        core.exchange(population, temperature, state)

    def _make_room(self, children: int) -> None:
        """Keep the set of plans met at most half full; above `MOST_REMEMBERED` it starts anew."""
        self._met += children
        if self._met > self._seen.size // 2:
            self._seen = np.zeros(min(4 * self._seen.size, MOST_REMEMBERED), np.uint64)
            self._met = children

    def parts(self, x: Vector) -> tuple[float, Parts]:
        """Return the value of the objective (infinite: not feasible) and what the tasks cost and need.

        The value is the seconds of an iteration where the objective is throughput (`hetrl.cost.objective`). The parts
        are those of the last vector that was asked about: copy what is to stay.
        """
        found = self.graded(x)
        return (found if found < INFEASIBLE else np.inf), self.bench.parts

    def graded(self, x: Vector) -> float:
        """Return the value of the objective, or `INFEASIBLE` and more, the farther from feasible the more."""
        found = self._result(x)[0]
        self._make_room(1)
        self.evaluations += core.remember(x, self.bench.pointers[0], self._seen)
        return found

    def iteration_seconds(self, x: Vector) -> float:
        """Return the seconds of an iteration, whatever the objective; infinite where the vector does not fit."""
        return self._result(x)[1]

    def _result(self, x: Vector) -> tuple[float, float]:
        if x.size != self.size:  # the core would read beyond it
            raise ValueError(f"a vector of {x.size} numbers; those of this problem have {self.size}")
        stale = np.ones(self.tables.tasks, np.bool_)
        while (row := core.value(x, stale, *self.bench.pointers)) != VALUED:
            self.rows.fill(self.tables.serving, row)
        found, seconds = self.bench.room.result.tolist()
        return found, seconds

    def values(self, batch: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the value of the objective for each vector (row) of a batch; infinite where it is not feasible."""
        return np.array([self.parts(x)[0] for x in np.atleast_2d(batch)])

    def repair(self, x: Vector) -> None:
        """Make a vector legal in place."""
        core.repair(x, self.bench.pointers[0])

    def mutate(self, x: Vector, seed: int) -> Vector:
        """Return a changed copy, as the evolution of sha-ea changes candidates."""
        child = x.copy()
        core.mutate(child, np.zeros(self.tables.tasks, np.bool_), seeded(seed), self.bench.pointers[0])
        return child

    @property
    def bounds(self) -> tuple[Vector, Vector]:
        """Return the least and the largest value of each gene, both inclusive."""
        return encoding_bounds(self.tables)

    def assemble(self, x: Vector, made: Made) -> Plan:
        """Return the plan of a vector that fits, with its prediction, which is that of the vector."""
        self._result(x)  # fills the rows of seconds that decode reads
        return plan_of(self.space.problem, decode(x, self.space, self.bench), made)
