"""Phase 1 of AReaL-Hex: the mixed-integer linear program, and what it chooses from (`areal_hex` states it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulp

from hetrl.hardware import Device
from hetrl.plan.plan import TaskPlan
from hetrl.search.baselines.uniform import Nodes

SPARE = 1e-3  # of a rollout rate beyond the need: it shortens the way of a sample, which the staleness bounds
Counts = tuple[int, ...]  # pieces of each class that the trainer takes


@dataclass(frozen=True)
class Pool:
    """Nodes (or equal parts of them) of one site, GPU type and size, and which stage may use them."""

    pieces: Nodes
    trains: bool
    serves: bool

    @property
    def first(self) -> Device:
        """Return a device that stands for all."""
        return self.pieces[0][0]

    @property
    def size(self) -> int:
        """Return the GPUs of a piece."""
        return len(self.pieces[0])


@dataclass(frozen=True)
class Column:
    """A partition with one strategy of the trainer: all tasks but generation, and their seconds."""

    counts: Counts
    tasks: Mapping[str, TaskPlan]
    seconds: float


@dataclass(frozen=True)
class Rollout:
    """A kind of rollout replica: its pool, TP, and samples per second."""

    pool: int
    tensor: int
    rate: float


def choose(
    columns: list[Column], rollouts: list[Rollout], pools: list[Pool], samples: int
) -> tuple[Column, list[int]] | None:
    """Solve phase 1: return the column and the number of replicas of each kind; None where nothing is feasible."""
    if not columns or not rollouts:
        return None
    model = pulp.LpProblem("areal_hex", pulp.LpMaximize)
    z = [model.add_variable(f"z{j}", cat="Binary") for j in range(len(columns))]
    y = [model.add_variable(f"y{c}", lowBound=0, cat="Integer") for c in range(len(rollouts))]
    rate = model.add_variable("iterations_per_second", lowBound=0)
    serving = pulp.lpSum(y[c] * kind.rate for c, kind in enumerate(rollouts)) / samples
    model += rate + SPARE * serving
    model += pulp.lpSum(z) == 1
    model += rate <= pulp.lpSum(z[j] / column.seconds for j, column in enumerate(columns))
    model += rate <= serving
    for index, pool in enumerate(pools):
        trainer = pulp.lpSum(z[j] * column.counts[index] * pool.size for j, column in enumerate(columns))
        taken = pulp.lpSum(y[c] * kind.tensor for c, kind in enumerate(rollouts) if kind.pool == index)
        model += trainer + taken <= pool.size * len(pool.pieces)
    model.solve(pulp.HiGHS(msg=False, threads=1))
    if pulp.LpStatus[model.status] != "Optimal" or pulp.value(rate) <= 0:
        return None
    chosen = max(range(len(columns)), key=lambda j: z[j].value())
    return columns[chosen], [round(number.value()) for number in y]
