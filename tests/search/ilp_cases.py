"""Random small problems for the tests of the integer program, and a search through its whole plan space."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from hetrl.hardware import Link, Node, Site, Topology
from hetrl.problem import Problem
from hetrl.search.core.ilp_states import (
    ACTIVE_GB,
    APART,
    CHAIN,
    CRITIC,
    GENERATION,
    HOST_GB,
    INFERENCES,
    RESIDENT_GB,
    RUNS,
    SECONDS,
    TOGETHER,
    TRAINING,
    VALUES,
)
from hetrl.search.core.tables import Tables
from hetrl.search.ilp.options import Menu, Options
from hetrl.workload import Lengths, Workload, architecture

GPUS = ("a100-80gb", "l40s", "a100-40gb")


def workload(algorithm: str, mode: str) -> Workload:
    """Qwen3-1.7B in all roles, few samples."""
    model = architecture("qwen3-1.7b")
    return Workload(
        algorithm=algorithm,
        mode=mode,
        max_staleness=1 if mode == "async" else 0,
        samples=32,
        samples_per_prompt=8,
        prompt_tokens=256,
        response=Lengths(256, 256),
        optimizer_steps_per_iteration=2,
        actor=model,
        critic=model if algorithm == "ppo" else None,
        reference=model,
        reward=model if algorithm == "ppo" else None,
    )


def problem(seed: int, algorithm: str, mode: str) -> Problem:
    """One to three linked sites with one node each: PPO to 4 devices, GRPO to 6; two A100 that carry any task."""
    draw = random.Random(seed)
    most, sites = 4 if algorithm == "ppo" else 6, [Site("s0", (Node("n0", "a100-80gb", 2, nic_gbps=100.0),))]
    for index in range(1, draw.randint(1, 3)):
        gpus = min(draw.choice((1, 2, 2, 4)), most - sum(site.nodes[0].gpus for site in sites))
        if gpus:
            sites.append(Site(f"s{index}", (Node("n0", draw.choice(GPUS), gpus, nic_gbps=100.0),)))
    names = [site.name for site in sites]
    links = [
        Link((a, b), draw.choice((5.0, 30.0)), draw.choice((1.0, 10.0)))
        for place, a in enumerate(names)
        for b in names[place + 1 :]
    ]
    return Problem(Topology(tuple(sites), tuple(links)), workload(algorithm, mode))


def trimmed(menu: Menu, seed: int, most: int) -> Menu:
    """Keep a few options of each task on each allotment, so that every combination can be tried."""
    draw, options = np.random.default_rng(seed), []
    for whole in menu.options:
        kept: list[int] = []
        first = [0]
        for begin, end in zip(whole.first, whole.first[1:], strict=False):
            kept += sorted(draw.permutation(np.arange(begin, end))[:most])
            first.append(len(kept))
        options.append(Options(whole.numbers[kept], whole.genes[kept], np.array(first)))
    return menu._replace(options=options, least=np.zeros_like(menu.least))


@dataclass
class Group:
    """What a group adds to a plan."""

    tasks: tuple[int, ...]
    phases: tuple[float, float, float, float]
    chain: float
    values: float
    transfer: float
    apart: tuple[float, ...]
    runs: tuple[float, ...]


@dataclass
class BruteForce:
    """Tries every set partition, every division of the devices and every choice of options."""

    menu: Menu
    tables: Tables
    best: float = math.inf
    known: dict[tuple[tuple[int, ...], int], list[Group]] = field(default_factory=dict)

    def least_seconds(self) -> float:
        """Return the objective of the best plan, infinite where there is none."""
        self._place(tuple(range(self.tables.tasks)), tuple(int(n) for n in self.tables.devices), [])
        return self.best

    def _place(self, left: tuple[int, ...], devices: tuple[int, ...], groups: list[Group]) -> None:
        """Give the first task left a group with some of the others, on some of the devices."""
        if not left:
            self.best = min(self.best, self._seconds(groups))
            return
        for others in product((False, True), repeat=len(left) - 1):
            members = (left[0], *(task for task, joins in zip(left[1:], others, strict=True) if joins))
            rest = tuple(task for task in left if task not in members)
            for a, allotment in enumerate(self.menu.allotments):
                if any(n > free for n, free in zip(allotment, devices, strict=True)):
                    continue
                after = tuple(free - int(n) for n, free in zip(allotment, devices, strict=True))
                for group in self._groups(members, a):
                    if self._busy([*groups, group]) < self.best:
                        self._place(rest, after, [*groups, group])

    def _groups(self, members: tuple[int, ...], a: int) -> list[Group]:
        if (members, a) not in self.known:
            self.known[members, a] = [*self._combinations(members, a)]
        return self.known[members, a]

    def _combinations(self, members: tuple[int, ...], a: int) -> Iterator[Group]:
        classes, tables = self.tables.classes, self.tables
        own = [
            self.menu.options[t].numbers[self.menu.options[t].first[a] : self.menu.options[t].first[a + 1]]
            for t in members
        ]
        for rows in product(*own):
            block = {name: [row[SECONDS + name * classes :][:classes] for row in rows] for name in range(6)}
            held = sum(block[RESIDENT_GB]) + np.max(block[ACTIVE_GB], axis=0)
            if (held > tables.usable_gb).any() or (sum(block[HOST_GB]) > tables.node_gb / tables.per_node).any():
                continue
            both = {tables.generation, tables.trainer} <= set(members)
            runs, together = sum(block[RUNS]), sum(block[TOGETHER])
            total = sum(rows)
            nothing = (0.0,) * classes
            yield Group(
                members,
                tuple(total[:CHAIN]),
                total[CHAIN],
                total[VALUES],
                max((w for w, r in zip(together, runs, strict=True) if r), default=0.0) if both else 0.0,
                nothing if both else tuple(sum(block[APART])),
                nothing if both else tuple(runs),
            )

    def _busy(self, groups: list[Group]) -> float:
        return max(sum(group.phases) for group in groups)

    def _seconds(self, groups: list[Group]) -> float:
        way = max(group.transfer for group in groups)
        for trainer, server in product(groups, groups):
            way = max([way, *(w for w, r in zip(trainer.apart, server.runs, strict=True) if r)])
        inferences = max(group.phases[INFERENCES] for group in groups)
        (generates,) = (group for group in groups if self.tables.generation in group.tasks)
        (actor,) = (group for group in groups if self.tables.trainer in group.tasks)
        ways, trained = 1 + self.tables.staleness, actor.phases[TRAINING] + way
        chain = generates.chain + inferences + trained
        if not self.tables.staleness:
            own = generates.phases[TRAINING] + generates.phases[CRITIC]
            chain = generates.phases[GENERATION] + inferences + max(trained, own)
        valued = 0.0
        if len(self.tables.trained) > 1:
            (critic,) = (group for group in groups if self.tables.trained[1] in group.tasks)
            valued = critic.phases[TRAINING] + critic.phases[CRITIC] + sum(group.values for group in groups)
        return max(self._busy(groups), way, chain / ways, valued / ways)
