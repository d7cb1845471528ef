"""Who takes part in a run: the addresses that its plan makes."""

from __future__ import annotations

from dataclasses import dataclass

from hetrl.plan.plan import Plan, TaskPlan, site_of, worlds
from hetrl.runtime import wire
from hetrl.workload import ACTOR_GENERATION


@dataclass(frozen=True)
class World:
    """The ranks of a Megatron task that compute together: `plan` is their part of it, `task` and `number` its name.

    The ranks of a task are counted through all of its worlds; `first` is the number of this one's rank 0.
    """

    task: str
    number: int
    first: int
    plan: TaskPlan

    @property
    def address(self) -> str:
        """Return the address of the world: its rank 0 speaks for it."""
        return wire.address(site_of(self.plan.rank_order()[0]), self.task, self.number)

    @property
    def ranks(self) -> tuple[str, ...]:
        """Return the addresses at which the ranks meet, in rank order."""
        devices = enumerate(self.plan.rank_order(), self.first)
        return tuple(wire.address(site_of(device), self.task + wire.RANK, rank) for rank, device in devices)

    def beside(self, rank: int) -> tuple[int, int]:
        """Return which one a rank is of those at its site, and how many these are."""
        sites = [site_of(device) for device in self.plan.rank_order()]
        return sites[:rank].count(sites[rank]), sites.count(sites[rank])


def worlds_of(plan: Plan, task: str) -> tuple[World, ...]:
    """Return the worlds of a Megatron task."""
    found, first = [], 0
    for number, part in enumerate(worlds(task, plan.tasks[task])):
        found.append(World(task, number, first, part))
        first += len(part.devices)
    return tuple(found)


def addresses_of(plan: Plan, task: str) -> tuple[str, ...]:
    """Return the members of a task in the plan's order: the replicas of generation, the worlds of a Megatron task."""
    if task != ACTOR_GENERATION:
        return tuple(world.address for world in worlds_of(plan, task))
    replicas = enumerate(plan.tasks[task].replicas)
    return tuple(wire.address(site_of(replica.devices[0]), task, number) for number, replica in replicas)


def keepers_of(plan: Plan) -> dict[str, str]:
    """Return the keeper of each member of a task: what moves checkpoints from and to its site lives in its process."""
    members = [member for task in plan.tasks for member in addresses_of(plan, task)]
    return {member: wire.address(wire.site_of(member), wire.KEEPER, n) for n, member in enumerate(members)}


def everyone(plan: Plan) -> tuple[str, ...]:
    """Return every address of a run but those of the gateways: nobody else is heard."""
    members = [wire.address(plan.lead_site, wire.CONTROLLER), *keepers_of(plan).values()]
    for task in plan.tasks:
        members += addresses_of(plan, task)
        if task != ACTOR_GENERATION:
            members += [rank for world in worlds_of(plan, task) for rank in world.ranks]
    return tuple(members)
