"""One group: the best layouts of its tasks on its devices together, under the devices' memory.

trainings and inferences: the few fastest layouts of each (alone), in order of their summed seconds
idle states: everything resident; trainings offloaded; inferences too; generation too
generation: laid out in the memory that the others leave
the first combination of layouts for which some idle states fit; of those the fastest
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from hetrl.cost.efficiency import rates
from hetrl.cost.iteration import GroupTimes, group_times, switch_seconds, task_cost
from hetrl.cost.memory import Footprint, task_footprints
from hetrl.cost.network import Direction
from hetrl.cost.stages import model_of
from hetrl.cost.training import Cost
from hetrl.plan import TaskPlan, node_of
from hetrl.search.serving_layouts import generation_layouts, inference_layouts
from hetrl.search.space import Allotment, Chunk, Space
from hetrl.search.training_layouts import Grid, ranked_grids, training_layouts
from hetrl.workload import ACTOR_GENERATION, INFERENCES, TRAININGS, Architecture

KEPT_LAYOUTS = 4  # the fastest layouts of a task, and as many again of those that need least memory
COMBINATIONS = 24  # of layouts tried for a group
_OFFLOADED: tuple[tuple[str, ...], ...] = ((), TRAININGS, (*TRAININGS, *INFERENCES))


@dataclass(frozen=True)
class Option:
    """One layout of one task, with its cost while it runs alone."""

    task: TaskPlan
    seconds: float
    wan: frozenset[Direction]
    memory_gb: float  # of the fullest device


@dataclass(frozen=True)
class GroupPlan:
    """The tasks of a group on concrete devices, with their times."""

    tasks: Mapping[str, TaskPlan]
    times: GroupTimes
    wan: frozenset[Direction]
    chunks: tuple[Chunk, ...]


class GroupPlanner:
    """Plans groups and remembers them: equal allotments of equal tasks are planned once."""

    def __init__(self, space: Space) -> None:
        """Start with nothing remembered."""
        self.space = space
        self._groups: dict[tuple[tuple[str, ...], Allotment], GroupPlan | None] = {}
        self._grids: dict[tuple[Architecture, Allotment], list[Grid]] = {}
        self._options: dict[tuple[str, Allotment], list[Option]] = {}

    def plan(self, tasks: tuple[str, ...], allotment: Allotment) -> GroupPlan | None:
        """Return the best layouts of the tasks on devices of the allotment; None where they do not fit."""
        key = (tasks, allotment)
        if key not in self._groups:
            packed = self.space.pack([allotment])
            self._groups[key] = self._solve(tasks, allotment, packed[0]) if packed else None
        return self._groups[key]

    def options(self, name: str, allotment: Allotment, chunks: Sequence[Chunk]) -> list[Option]:
        """Return the layouts of a training or inference task worth combining, fastest first."""
        usable = tuple(n if self.space.usable(name, kind) else 0 for kind, n in enumerate(allotment))
        key = (name, usable)
        if key not in self._options:
            own = [chunk for chunk in chunks if usable[chunk.kind]]
            layouts = self._layouts(name, usable, own) if own else []
            self._options[key] = _worth_keeping(list(layouts))
        return self._options[key]

    def _layouts(self, name: str, usable: Allotment, chunks: Sequence[Chunk]) -> Iterable[Option]:
        """Return a task's layouts; trainings of equal models share their ranked grids."""
        if name not in TRAININGS:
            found = inference_layouts(self.space, name, chunks)
            return (Option(task, seconds, frozenset(), self._fullest_gb(name, task)) for task, seconds in found)
        key = (model_of(name, self.space.problem.workload), usable)
        if key not in self._grids:
            self._grids[key] = ranked_grids(self.space, name, chunks)
        return (self._option(name, task) for task in training_layouts(self.space, name, self._grids[key]))

    def _option(self, name: str, task: TaskPlan) -> Option:
        problem = self.space.problem
        cost = task_cost(name, task, problem.topology, problem.workload)
        return Option(task, cost.seconds, frozenset(cost.wan_bytes), self._fullest_gb(name, task))

    def _fullest_gb(self, name: str, task: TaskPlan) -> float:
        needs = task_footprints(name, task, self.space.problem.topology, self.space.problem.workload)
        return max(need.total_gb for _, need in needs)

    def _solve(self, tasks: tuple[str, ...], allotment: Allotment, chunks: list[Chunk]) -> GroupPlan | None:
        others = [name for name in tasks if name != ACTOR_GENERATION]
        options = [self.options(name, allotment, chunks) for name in others]
        if not all(options):
            return None
        combinations = islice(product(*options), 4096)
        for chosen in sorted(combinations, key=lambda c: sum(option.seconds for option in c))[:COMBINATIONS]:
            best: GroupPlan | None = None
            for offloaded in _offloads(others, ACTOR_GENERATION in tasks):
                found = self._with_idle_states(tasks, others, chosen, offloaded, chunks)
                if found is not None and (best is None or found.times.total < best.times.total):
                    best = found
                if best is not None and ACTOR_GENERATION not in tasks:
                    break  # only generation gains from the room that more offloading makes
            if best is not None:
                return best
        return None

    def _with_idle_states(
        self,
        tasks: tuple[str, ...],
        others: Sequence[str],
        chosen: Sequence[Option],
        offloaded: Sequence[str],
        chunks: list[Chunk],
    ) -> GroupPlan | None:
        plans = {
            name: replace(option.task, idle_state="offload" if name in offloaded else "resident")
            for name, option in zip(others, chosen, strict=True)
        }
        footprints = self._footprints(plans)
        if footprints is None:
            return None
        costs = {name: Cost(option.seconds, {}, {}) for name, option in zip(others, chosen, strict=True)}
        problem = self.space.problem
        if ACTOR_GENERATION in tasks:
            generation = self._generation(chunks, footprints)
            if generation is None:
                return None
            plans[ACTOR_GENERATION] = generation[0]
            costs[ACTOR_GENERATION] = task_cost(ACTOR_GENERATION, generation[0], problem.topology, problem.workload)
        times = group_times(plans, costs, problem.topology, problem.workload)
        wan = frozenset(direction for option in chosen for direction in option.wan)
        return GroupPlan({name: plans[name] for name in tasks}, times, wan, tuple(chunks))

    def _footprints(self, plans: Mapping[str, TaskPlan]) -> dict[str, tuple[float, float]] | None:
        """Return resident and largest active GB per device; None where a device or a node's host memory overflows."""
        problem = self.space.problem
        held: dict[str, tuple[float, float]] = {}
        host: defaultdict[str, float] = defaultdict(float)
        needs: Footprint
        for name, task in plans.items():
            for device, needs in task_footprints(name, task, problem.topology, problem.workload):
                resident, active = held.get(device, (0.0, 0.0))
                held[device] = (resident + needs.resident_gb, max(active, needs.active_gb))
                host[node_of(device)] += needs.host_gb
        for device, (resident, active) in held.items():
            if resident + active > rates(problem.topology.device_by_id[device].gpu).usable_gb:
                return None
        nodes = problem.topology.node_by_id
        return None if any(gb > nodes[node].host_memory_gb for node, gb in host.items()) else held

    def _generation(
        self, chunks: list[Chunk], held: Mapping[str, tuple[float, float]]
    ) -> tuple[TaskPlan, float] | None:
        """Return the fastest generation in what the others leave, with its weights resident where that fits.

        With `sleep` the KV cache is given back, so only weights count beside the others' active sets; `offload` gives
        back the weights too.
        """
        topology, workload = self.space.problem.topology, self.space.problem.workload
        room = {d: rates(topology.device_by_id[d].gpu).usable_gb - resident for d, (resident, _) in held.items()}
        found = [
            (seconds + switch_seconds(ACTOR_GENERATION, task, topology, workload), index, seconds, task)
            for idle in (("sleep", "offload") if held else ("resident",))
            for index, (task, seconds) in enumerate(generation_layouts(self.space, chunks, room, idle))
        ]
        for _, _, seconds, task in sorted(found, key=lambda entry: entry[:2]):
            if self._fits_beside(task, held):
                return task, seconds
        return None

    def _fits_beside(self, task: TaskPlan, held: Mapping[str, tuple[float, float]]) -> bool:
        topology = self.space.problem.topology
        for device, needs in task_footprints(ACTOR_GENERATION, task, topology, self.space.problem.workload):
            resident, active = held.get(device, (0.0, 0.0))
            gpu = rates(topology.device_by_id[device].gpu)
            if resident + needs.resident_gb + max(active, needs.active_gb) > gpu.usable_gb * (1 + 1e-12):
                return False
        return True


def _offloads(names: Sequence[str], beside_generation: bool) -> list[tuple[str, ...]]:
    """Return the sets of tasks to offload: none, the trainings, all; beside generation none or all."""
    sets = (_OFFLOADED[0], _OFFLOADED[-1]) if beside_generation else _OFFLOADED
    return list(dict.fromkeys(tuple(n for n in names if n in some) for some in sets))


def _worth_keeping(options: Sequence[Option]) -> list[Option]:
    """Return the fastest, and the fastest among those that need ever less memory."""
    ordered = sorted((o for o in options if o.seconds < float("inf")), key=lambda o: (o.seconds, o.memory_gb))
    kept = ordered[:KEPT_LAYOUTS]
    frugal, least = [], float("inf")
    for option in ordered:
        if option.memory_gb < least * 0.9:
            frugal.append(option)
            least = option.memory_gb
    kept += [option for option in frugal[-KEPT_LAYOUTS:] if option not in kept]
    return kept
