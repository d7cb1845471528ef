"""The objective of a candidate: a grouping of the tasks and an allotment per group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from hetrl.cost.iteration import GroupTimes, group_times, iteration_seconds, task_cost
from hetrl.cost.weight_sync import weight_routes, weight_sync_cost
from hetrl.plan import TaskPlan, site_of
from hetrl.search.groups import GroupPlan, GroupPlanner
from hetrl.search.space import Allotment, Grouping, Space, linked
from hetrl.workload import ACTOR_GENERATION, ACTOR_TRAINING, TRAININGS

Candidate = tuple[Grouping, tuple[Allotment, ...]]
INFEASIBLE = float("inf")


@dataclass(frozen=True)
class Value:
    """The seconds of an iteration and the groups that reach it."""

    seconds: float
    groups: tuple[GroupPlan, ...]


class Evaluator:
    """Values candidates; `evaluations` counts the distinct complete plans that were valued."""

    def __init__(self, space: Space) -> None:
        """Start with nothing valued."""
        self.space = space
        self.groups = GroupPlanner(space)
        self._values: dict[Candidate, Value] = {}
        self._syncs: dict[tuple[int, int], tuple[float, float]] = {}

    @property
    def evaluations(self) -> int:
        """Return how many distinct complete plans were valued; those met again do not count."""
        return len(self._values)

    def value(self, candidate: Candidate) -> Value:
        """Return the value of a candidate; infinite seconds where it is not feasible."""
        if candidate not in self._values:
            self._values[candidate] = self._value(*candidate)
        return self._values[candidate]

    def _value(self, grouping: Grouping, allotments: Sequence[Allotment]) -> Value:
        nothing = Value(INFEASIBLE, ())
        if self.space.pack(allotments) is None:
            return nothing
        found = []
        for tasks, allotment in zip(grouping, allotments, strict=True):
            group = self.groups.plan(tasks, allotment)
            if group is None:
                return nothing
            found.append(group)
        if not self._linked(found):
            return nothing
        problem = self.space.problem
        times = self._shared_times(found)
        transfer, pause = self._sync(found)
        return Value(iteration_seconds(times, transfer, pause, problem.workload), tuple(found))

    def _linked(self, groups: Sequence[GroupPlan]) -> bool:
        """Return whether the lead site reaches every used site, and each training's sites reach each other."""
        topology = self.space.problem.topology
        if len(topology.sites) == 1:
            return True
        used: dict[str, None] = {}
        for group in groups:
            for name, task in group.tasks.items():
                sites = _sites(task)
                used.update(dict.fromkeys(sites))
                if name in TRAININGS and not all(linked(topology, a, b) for a, b in combinations(sites, 2)):
                    return False
        lead = site_of(self._task(groups, ACTOR_TRAINING).devices[0])
        return all(linked(topology, lead, site) for site in used)

    def _shared_times(self, groups: Sequence[GroupPlan]) -> list[GroupTimes]:
        """Return the groups' times, trainings slowed where several groups use a link between sites."""
        users = Counter(direction for group in groups for direction in group.wan)
        sharing = {direction: count for direction, count in users.items() if count > 1}
        if not sharing:
            return [group.times for group in groups]
        problem, times = self.space.problem, []
        for group in groups:
            trainings = {name: group.tasks[name] for name in group.tasks if name in TRAININGS}
            if not trainings or not any(direction in sharing for direction in group.wan):
                times.append(group.times)
                continue
            costs = {
                name: task_cost(name, task, problem.topology, problem.workload, sharing)
                for name, task in trainings.items()
            }
            slowed = group_times(trainings, costs, problem.topology, problem.workload).trainings
            times.append(replace(group.times, trainings=slowed))
        return times

    def _sync(self, groups: Sequence[GroupPlan]) -> tuple[float, float]:
        """Return transfer and pause of a weight version."""
        trainer = self._task(groups, ACTOR_TRAINING)
        generator = self._task(groups, ACTOR_GENERATION)
        key = (id(trainer), id(generator))  # both are kept alive by the group planner
        if key not in self._syncs:
            routes = weight_routes(trainer, generator)
            cost = weight_sync_cost(
                routes, trainer, generator, self.space.problem.topology, self.space.problem.workload
            )
            self._syncs[key] = (cost.transfer_seconds, cost.pause_seconds)
        return self._syncs[key]

    def _task(self, groups: Sequence[GroupPlan], name: str) -> TaskPlan:
        return next(group.tasks[name] for group in groups if name in group.tasks)


def _sites(task: TaskPlan) -> list[str]:
    return list(dict.fromkeys(site_of(device) for device in task.devices))
