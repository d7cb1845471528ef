"""What the planner chooses from: set partitions of the tasks, device counts per class and group, devices by class.

A class holds devices that are equal in all that the cost model sees: site, GPU, and the node's size, bandwidths and
host memory. An *allotment* is the number of devices that a group gets of each class, in the order of `Space.classes`. A
*chunk* is the part of it that lies in one node: whole nodes first, then one remainder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetrl.cost.formulas import deal_remainders
from hetrl.hardware import Device, NodeKind, Topology
from hetrl.problem import Problem
from hetrl.workload import ENGINE_OF_TASK, TRAININGS

Allotment = tuple[int, ...]
Grouping = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chunk:
    """Devices of one class in one node."""

    kind: int  # index into Space.classes
    devices: tuple[Device, ...]


@dataclass(frozen=True, eq=False)
class Space:
    """The device classes of a problem and how many devices each has; with `sites`, only those sites may be used.

    `excluded` is a grouping that sha-ea leaves out. `home`: each training stays in one site.
    """

    problem: Problem
    sites: frozenset[str] | None = None
    excluded: Grouping | None = None
    home: bool = False

    @cached_property
    def nodes(self) -> tuple[tuple[tuple[Device, ...], ...], ...]:
        """Return, for each class, the devices of each of its nodes; classes in the order of their first device."""
        topology = self.problem.topology
        found: dict[int, list[tuple[Device, ...]]] = {}
        for site in topology.sites:
            for node in site.nodes:
                devices = tuple(Device(site.name, node.name, index, node.gpu) for index in range(node.gpus))
                found.setdefault(topology.node_class[devices[0].node_id], []).append(devices)
        return tuple(tuple(nodes) for nodes in found.values())

    @cached_property
    def classes(self) -> tuple[NodeKind, ...]:
        """Return each device class's kind of node; two may be of one where their networks or host memories differ."""
        return tuple(self.problem.topology.kind_of(nodes[0][0]) for nodes in self.nodes)

    @cached_property
    def sizes(self) -> Allotment:
        """Return the number of devices of each class."""
        return tuple(sum(map(len, nodes)) for nodes in self.nodes)

    def usable(self, task: str, kind: int) -> bool:
        """Return whether the class's site may be used and has the engine of the task; trainings get whole GPUs."""
        site = self.problem.topology.site_by_name[self.classes[kind].site]
        whole = task not in TRAININGS or not self.sliced(kind)
        return (self.sites is None or site.name in self.sites) and ENGINE_OF_TASK[task] in site.engines and whole

    def sliced(self, kind: int) -> bool:
        """Return whether the devices of a class are slices of GPUs: each works alone."""
        return bool(self.problem.topology.slice_of(self.nodes[kind][0][0]))

    def joined(self, kind: int) -> int:
        """Return how many devices of one node of a class a replica may have."""
        return 1 if self.sliced(kind) else self.classes[kind].gpus_per_node

    def pack(self, allotments: Sequence[Allotment]) -> list[list[Chunk]] | None:
        """Return each group's chunks on disjoint devices; None where a remainder would be torn over two nodes.

        Whole nodes go first; the remainders follow (`deal_remainders`).
        """
        packed: list[list[Chunk]] = [[] for _ in allotments]
        for kind, nodes in enumerate(self.nodes):
            size = self.classes[kind].gpus_per_node
            free = [list(node) for node in nodes]
            for group, allotment in enumerate(allotments):
                for _ in range(allotment[kind] // size):
                    if not free:
                        return None
                    packed[group].append(Chunk(kind, tuple(free.pop(0))))
            remainders = [allotment[kind] % size for allotment in allotments]
            places = deal_remainders(remainders, size, len(free))
            for group in sorted(range(len(places)), key=lambda group: (-remainders[group], group)):
                if remainders[group] == 0:
                    break
                if places[group] < 0:
                    return None
                room = free[places[group]]
                packed[group].append(Chunk(kind, tuple(room[: remainders[group]])))
                del room[: remainders[group]]
        return packed


def stars(topology: Topology) -> list[frozenset[str]]:
    """Return the largest sets of sites that have a link to one of them, which may lead; one set if all are linked."""
    names = [site.name for site in topology.sites]
    found = dict.fromkeys(frozenset(other for other in names if topology.linked(name, other)) for name in names)
    return [star for star in found if not any(star < other for other in found)]


def clique(topology: Topology) -> frozenset[str]:
    """Return sites that are all linked with each other: each in turn, in the topology's order, if it fits in."""
    chosen: list[str] = []
    for site in topology.sites:
        if all(topology.linked(site.name, other) for other in chosen):
            chosen.append(site.name)
    return frozenset(chosen)


def linked_sets(topology: Topology) -> Iterator[frozenset[str]]:
    """Yield the largest sets of sites that are all linked with each other (Bron and Kerbosch, CACM 16, 1973)."""
    names = [site.name for site in topology.sites]
    near = {name: {other for other in names if other != name and topology.linked(name, other)} for name in names}

    def grow(chosen: set[str], left: set[str], done: set[str]) -> Iterator[frozenset[str]]:
        if not left and not done:
            yield frozenset(chosen)
        for name in sorted(left):
            yield from grow(chosen | {name}, left & near[name], done & near[name])
            left, done = left - {name}, done | {name}

    yield from grow(set(), set(names), set())


def set_partitions(items: Sequence[str]) -> Iterator[Grouping]:
    """Yield every set partition, coarsest first within each step (Bell numbers: 203 for six tasks)."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        for index, block in enumerate(partition):
            yield (*partition[:index], (first, *block), *partition[index + 1 :])
        yield ((first,), *partition)


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to the limit."""
    return [1 << exponent for exponent in range(limit.bit_length())]
